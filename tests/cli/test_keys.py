"""`powerguard keys`: from nothing to two nodes that believe each other, and every way to get it wrong."""

from __future__ import annotations

import io
import json
import stat

import pytest

from powerguard.cli import run
from powerguard.node import keyring


def called(capsys, *words: object) -> tuple[int, str, str]:
    code = run(["keys", *map(str, words)])
    return (code, *capsys.readouterr())


@pytest.fixture
def two(tmp_path, capsys):
    """Two folders with a key each, and the public key of each in a file."""
    for node in ("a", "b"):
        assert called(capsys, "generate", "--dir", tmp_path / node, "--node", node)[0] == 0
        code, text, _ = called(capsys, "show", "--dir", tmp_path / node, "--address", f"{node}.example")
        assert code == 0
        (tmp_path / f"{node}.key").write_text(text)
    return tmp_path


def test_two_nodes_come_to_believe_each_other(two, capsys):
    """generate, show, trust, list: the other's name, key and address arrive."""
    for node, peer in (("a", "b"), ("b", "a")):
        code, out, err = called(capsys, "trust", two / f"{peer}.key", "--dir", two / node)
        assert (code, err) == (0, "")
        assert f"{peer} is believed, at {peer}.example" in out
        assert list(keyring.load(two / node, node).trusted) == [peer]
    code, out, _ = called(capsys, "list", "--json", "--dir", two / "a")
    (one,) = json.loads(out)["trusted"]

    assert (one["node"], one["addresses"]) == ("b", ["b.example"])
    assert keyring.read_own(two / "b").public in called(capsys, "list", "--dir", two / "a")[1]
    assert called(capsys, "forget", "b", "--dir", two / "a")[0] == 0
    assert keyring.load(two / "a", "a").trusted == {}


def test_a_key_comes_through_a_pipe(two, capsys, monkeypatch):
    """`ssh gpu2 powerguard keys show | powerguard keys trust -`."""
    monkeypatch.setattr("sys.stdin", io.StringIO((two / "b.key").read_text()))

    assert called(capsys, "trust", "-", "--dir", two / "a")[0] == 0
    assert list(keyring.load(two / "a", "a").trusted) == ["b"]


def test_what_show_prints_holds_no_secret(two):
    """It is sent around."""
    for node in ("a", "b"):
        assert keyring.read_own(two / node).secret.reveal() not in (two / f"{node}.key").read_text()
        assert stat.S_IMODE((two / node / "node.secret").stat().st_mode) == 0o600


def test_the_folder_and_the_name_come_from_the_configuration(tmp_path, capsys):
    """-c FILE says where keys are, and who this is."""
    file = tmp_path / "pg.toml"
    file.write_text(
        f'[node]\nname = "gpu9"\n[[ups]]\nname = "a"\n[peers]\nkeys = "{tmp_path}/k"\naddress = "gpu9.lan"\n'
    )

    assert called(capsys, "generate", "-c", file)[0] == 0
    assert keyring.load(tmp_path / "k", "gpu9").own.node == "gpu9"
    assert 'addresses = ["gpu9.lan"]' in called(capsys, "show", "-c", file)[1]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("generate", "--dir", "{}/a"), "is there already; --replace"),
        (("generate", "--dir", "{}/c", "--node", "../x"), "can't be the name of a node"),
        (("show", "--dir", "{}/c"), "isn't there; powerguard keys generate"),
        (("show", "--dir", "{}/a", "--address", "a b"), "isn't an address"),
        (("trust", "{}/nowhere", "--dir", "{}/a"), "isn't a public key: No such file"),
        (("trust", "{}/a.key", "--dir", "{}/a"), "is this node"),
        (("trust", "{}/b/node.secret", "--dir", "{}/a"), "holds a secret key"),
        (("forget", "x", "--dir", "{}/a"), "isn't trusted"),
        (("generate", "--dir", "/proc/nowhere"), "can't be made"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_do(two, capsys, words, why):
    """No traceback, an exit code that isn't success."""
    code, _, err = called(capsys, *(word.format(two) for word in words))

    assert code in (2, 3, 8)
    assert why in err
    assert err.count("\n") == 1


def test_nothing_is_believed_where_one_of_several_is_wrong(two, capsys):
    """All files are read before the first is taken."""
    (two / "bad.key").write_text("nonsense")
    code, _, _ = called(capsys, "trust", two / "b.key", two / "bad.key", "--dir", two / "a")

    assert code == 2
    assert keyring.load(two / "a", "a").trusted == {}
