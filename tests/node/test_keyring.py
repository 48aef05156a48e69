"""Keys of nodes: a key is for one name, and nothing that isn't one is taken for one."""

from __future__ import annotations

import os
import stat

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from powerguard.config import Secret
from powerguard.errors import ConfigError, UsageError
from powerguard.node import keyring
from powerguard.node.dial import belongs, new_pair
from powerguard.node.keyring import Own, Trusted


@pytest.fixture
def folder(tmp_path):
    """A folder with the key of node `a`."""
    keyring.keep_own(tmp_path / "keys", new_pair("a"))
    return tmp_path / "keys"


def other(node: str = "b", *addresses: str) -> Trusted:
    return Trusted(node, new_pair(node).public, addresses)


def test_a_pair_is_kept_for_its_owner_alone(folder):
    """Mode 0600, both keys as they were made, and no way to see the secret by accident."""
    own = keyring.read_own(folder)

    assert stat.S_IMODE((folder / "node.secret").stat().st_mode) == 0o600
    assert belongs(own)
    assert own.secret.reveal() not in repr(own)


def test_a_pair_is_never_overwritten_unasked(folder):
    """A second generate would lock this node out of every other."""
    with pytest.raises(UsageError, match="there already"):
        keyring.keep_own(folder, new_pair("a"))
    keyring.keep_own(folder, new_pair("a"), replace=True)

    assert belongs(keyring.read_own(folder))


def test_a_secret_that_others_can_read_is_refused(folder):
    """It may have been copied already."""
    os.chmod(folder / "node.secret", 0o640)

    with pytest.raises(ConfigError, match=r"read by others.*chmod 600"):
        keyring.load(folder, "a")


def test_a_key_speaks_for_one_node(folder):
    """A folder copied to another node isn't its key."""
    with pytest.raises(ConfigError, match="is the key of 'a', and this node is 'b'"):
        keyring.load(folder, "b")


def test_without_a_key_it_says_what_to_do(tmp_path):
    """A missing key is made by a command."""
    with pytest.raises(ConfigError, match="powerguard keys generate"):
        keyring.load(tmp_path, "a")


def test_a_trusted_key_is_found_by_its_bytes(folder):
    """The table that connections are judged by holds what ZeroMQ shows of them."""
    b = other("b", "10.0.0.2", "[fd00::2]:9000")
    keyring.trust(folder, b)
    ring = keyring.load(folder, "a")

    assert ring.trusted == {"b": b}
    assert ring.names == {z85.decode(b.public.encode()): "b"}
    assert ring.problems == ()


def test_names_and_keys_are_one_to_one(folder):
    """No second key for a name, no second name for a key, and never this node's."""
    b = other("b")
    keyring.trust(folder, b)

    with pytest.raises(UsageError, match="known by another key"):
        keyring.trust(folder, other("b"))
    with pytest.raises(UsageError, match="another node is known"):
        keyring.trust(folder, Trusted("c", b.public))
    with pytest.raises(UsageError, match="is this node"):
        keyring.trust(folder, other("a"))
    new = other("b")
    keyring.trust(folder, new, replace=True)
    assert keyring.load(folder, "a").trusted == {"b": new}


def test_files_that_were_put_there_by_hand_are_judged_too(folder):
    """A wrong name, a taken key, a secret, nonsense, a device: each is said, and none is believed."""
    b = other("b")
    keyring.trust(folder, b)
    there = folder / "trusted"
    (there / "c.key").write_text(keyring.describe(b))
    (there / "d.key").write_text(keyring.describe(Trusted("e", new_pair("e").public)))
    (there / "f.key").write_text((folder / "node.secret").read_text())
    (there / "g.key").write_text('node = "../g"\npublic = ""')
    (there / "h.key").symlink_to("/dev/zero")
    (there / "i.key").write_bytes(b"\xff" * 100)
    (there / "j.key").write_text("x" * 100_000)
    own = keyring.read_own(folder)
    (there / "z.key").write_text(keyring.describe(Trusted("z", own.public)))
    ring = keyring.load(folder, "a")

    assert list(ring.trusted) == ["b"]
    assert len(ring.problems) == 8


def test_forgotten_is_forgotten(folder):
    """And what was never known can't be."""
    keyring.trust(folder, other("b"))
    keyring.forget(folder, "b")

    assert keyring.load(folder, "a").trusted == {}
    for node in ("b", "../node", ""):
        with pytest.raises(UsageError, match="isn't trusted"):
            keyring.forget(folder, node)


@given(st.text(max_size=300))
def test_any_text_is_a_key_or_a_value_error(text):
    """Whatever a file holds."""
    try:
        one = keyring.parse(text)
    except ValueError:
        return
    assert keyring.parse(keyring.describe(one)) == one


@given(st.binary(min_size=32, max_size=32))
def test_every_key_is_read_as_zeromq_reads_it(raw):
    """Z85, both ways."""
    text = z85.encode(raw).decode()

    assert raw == keyring.unz85(text)
    assert keyring.parse(keyring.describe(Trusted("n", text))).public == text


def test_a_pair_that_doesnt_belong_together_is_noticed():
    """A public key of another secret would lock the node out in silence."""
    public, secret = zmq.curve_keypair()
    stranger, _ = zmq.curve_keypair()

    assert belongs(Own("n", public.decode(), Secret(secret.decode())))
    assert not belongs(Own("n", stranger.decode(), Secret(secret.decode())))
    assert not belongs(Own("n", public.decode(), Secret("nonsense")))


@pytest.mark.parametrize(
    ("address", "resolved", "node"),
    [
        ("gpu1", (), "gpu1"),
        ("GPU1.cluster.example.", (), "gpu1"),
        ("10.0.0.1", (), "gpu1"),
        ("gpu1.cluster.example:29500", (), "gpu1"),
        ("head", (), "gpu2"),
        ("elsewhere", ("10.0.0.2",), "gpu2"),
        ("elsewhere", (), ""),
        ("172.17.0.1", (), ""),  # a bridge's address, which each of them has
        ("10.0.0.9", ("fd00::2",), "gpu2"),
        ("", (), ""),
    ],
)
def test_a_master_address_is_of_one_node(address, resolved, node):
    """By name, by first label, by listed address, by what it resolves to; never by what two nodes share."""
    ring = {
        "gpu1": Trusted("gpu1", "k1", ("10.0.0.1", "172.17.0.1")),
        "gpu2": Trusted("gpu2", "k2", ("10.0.0.2:9999", "head", "[fd00::2]:1", "172.17.0.1")),
    }

    assert keyring.find(ring, address, resolved) == node
