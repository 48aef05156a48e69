"""Which nodes are dialled, by what address, and what is said where nobody can be: real resolver, real sockets."""

from __future__ import annotations

import contextlib
import time

import msgspec
import pytest

from powerguard.config import loads
from powerguard.core.between import PeerReport, Report
from powerguard.core.decide import decide
from powerguard.core.messages import Hello
from powerguard.core.policy import Policy
from powerguard.core.state import State, initial
from powerguard.core.types import Observation, RankReport
from powerguard.node import keyring
from powerguard.node.addresses import Resolver, is_here, joined, own_addresses, split
from powerguard.node.dial import new_pair
from powerguard.node.keyring import Trusted
from powerguard.node.lines import Lines, opened
from tests.node.peers_rig import free_port


def spanning(node: str, master: str, addresses: tuple[str, ...] = ()) -> State:
    """The state of a daemon whose node holds rank 1 of a job of two, led by the node on *master*."""
    now = time.monotonic()
    state = initial("boot", now, node=node, addresses=addresses)
    hello = Hello("job", 1, 0, 2, 4711, "/c", master=master)
    return decide(Policy(), state, Observation(reports=(RankReport("job", 1, now, hello),)), now).state


class Side:
    """A node with its folder of keys and its lines by configuration, on a loopback address of its own."""

    def __init__(self, folder, name: str, address: str, port: int) -> None:
        self.name, self.address, self.folder = name, address, folder / name
        self.heard: list[PeerReport] = []
        self.own = new_pair(name)
        keyring.keep_own(self.folder, self.own)
        peers = f'[peers]\nlisten = "{address}:{port}"\nkeys = "{self.folder}"\n'
        text = f'[node]\nname = "{name}"\n[[ups]]\nname = "u"\n{peers}'
        self.config = loads(text, env={})
        self.lines = Lines()

    def trust(self, other: Side) -> None:
        keyring.trust(self.folder, Trusted(other.name, other.own.public, (other.address,)))

    def open(self) -> None:
        self.lines = opened(self.config, put=self.heard.append, clock=time.monotonic)


@pytest.fixture
def sides(tmp_path):
    """Two nodes that believe each other, a on 127.0.0.2 and b on 127.0.0.3, with one port, as real hosts have."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        a, b = Side(tmp_path, "a", "127.0.0.2", port), Side(tmp_path, "b", "127.0.0.3", port)
        a.trust(b)
        b.trust(a)
        for side in (a, b):
            side.open()
            stack.callback(side.lines.close)
        yield a, b


def test_a_follower_finds_its_leader_by_the_master_address(sides, eventually):
    """Only the job's MASTER_ADDR is known: the node behind it is dialled, and hears of the ranks."""
    a, b = sides
    b.lines._own.clear()  # both addresses are this machine's
    state = spanning("b", "a")

    eventually(lambda: b.lines.say(Policy(), state, time.monotonic()) or a.heard)
    (report,) = [each.message for each in a.heard][:1]
    assert isinstance(report, Report)
    assert (a.heard[0].node, report.job, [rank.rank for rank in report.ranks]) == ("b", "job", [1])
    assert b.lines.trouble(state) == ""


def test_a_leader_lets_its_followers_dial(sides, eventually):
    """It answers on their lines, and dials them itself only where they don't come."""
    a, b = sides
    state = spanning("b", "a")
    eventually(lambda: b.lines.say(Policy(), state, time.monotonic()) or a.heard)
    now = time.monotonic()
    own = RankReport("job", 0, now, Hello("job", 0, 0, 2, 4712, "/c", master="a"))
    leads = decide(Policy(), initial("x", now, node="a"), Observation(reports=(own,), peers=(a.heard[-1],)), now).state
    a.lines.say(Policy(), leads, time.monotonic())
    eventually(lambda: b.heard)

    assert a.lines._peers._wanted == {}
    assert b.heard[0].node == "a"


def test_a_master_that_no_key_is_of_is_said(sides, eventually):
    """Whose key is missing, and how to bring it."""
    _, b = sides
    state = spanning("b", "192.0.2.77")
    b.lines.say(Policy(), state, time.monotonic())

    assert "no trusted key is of 192.0.2.77" in b.lines.trouble(state)
    assert "powerguard keys trust" in b.lines.trouble(state)


def test_an_address_of_our_own_is_told_to_the_core(sides):
    """The master's name means this node: nobody is dialled, and the core learns that it leads."""
    a, _ = sides
    state = spanning("a", "127.0.0.9")
    a.lines.say(Policy(), state, time.monotonic())

    assert a.lines.here() == ("127.0.0.9",)
    assert a.lines.here() == ()
    assert a.lines.trouble(state) == ""


def test_without_peers_no_port_is_open():
    """The configuration of a single node: no socket, no thread, and a job of several nodes is told about."""
    lines = opened(loads('[[ups]]\nname = "u"\n', env={}), put=print, clock=time.monotonic)
    state = spanning("b", "a.example")
    lines.say(Policy(), state, time.monotonic())

    assert not lines.open
    assert lines.addresses == ()
    assert lines.trouble(state) == "job job: no [peers] in the configuration"
    assert lines.trouble(initial("x", 0.0)) == ""
    lines.close()


def test_a_node_without_a_key_watches_alone(tmp_path):
    """What is missing is said, and how to get it; the daemon goes on."""
    text = f'[node]\nname = "a"\n[[ups]]\nname = "u"\n[peers]\nlisten = ":{free_port()}"\nkeys = "{tmp_path}"\n'
    lines = opened(loads(text, env={}), put=print, clock=time.monotonic)

    assert not lines.open
    assert "powerguard keys generate" in lines.trouble(spanning("a", "b.example"))


def test_a_reload_brings_new_keys(sides, eventually):
    """A node trusted after the start is spoken to once the keys were read anew."""
    a, b = sides
    keyring.forget(b.folder, "a")
    assert b.lines.reload() == ""
    state = spanning("b", "a")
    b.lines.say(Policy(), state, time.monotonic())
    assert "no trusted key" in b.lines.trouble(state)
    b.trust(a)
    assert b.lines.reload() == ""

    eventually(lambda: b.lines.say(Policy(), state, time.monotonic()) or a.heard)
    assert b.lines.trouble(state) == ""


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("gpu1", "gpu1", 7),
        ("gpu1:29500", "gpu1", 29500),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("fd00::1", "fd00::1", 7),
        ("[fd00::1]", "fd00::1", 7),
        ("[fd00::1]:9", "fd00::1", 9),
    ],
)
def test_addresses_with_and_without_ports(text, host, port):
    """Every way to write a host, and back."""
    assert split(text, 7) == (host, port)
    assert split(joined(host, port)) == (host, port)


def test_what_is_here_is_known_without_asking_anybody():
    """Loopback and own addresses are; a documentation address isn't. Names are looked up in the background."""
    assert is_here("127.0.0.5")
    assert all(is_here(address) for address in own_addresses())
    assert not is_here("192.0.2.1") or "192.0.2.1" in own_addresses()
    assert not is_here("no address")
    resolver = Resolver()
    assert resolver.addresses("10.1.2.3") == ("10.1.2.3",)
    ends = time.monotonic() + 30.0
    while not resolver.addresses("localhost") and time.monotonic() < ends:
        time.sleep(0.01)
    assert set(resolver.addresses("localhost")) & {"127.0.0.1", "::1"}
    resolver.close()


def test_a_word_that_cant_be_framed_stops_no_other(sides, eventually):
    """One word beyond the limits is said in the log; the words for other jobs still go out."""
    a, b = sides
    b.lines._own.clear()
    state = spanning("b", "a")
    long = spanning("b", "a").jobs["job"]
    member = msgspec.structs.replace(long.members[1], gone="x" * 5000)
    state.jobs["a first one"] = msgspec.structs.replace(long, name="a first one", members={1: member})

    eventually(lambda: b.lines.say(Policy(), state, time.monotonic()) or a.heard)
    assert {each.message.job for each in a.heard} == {"job"}
