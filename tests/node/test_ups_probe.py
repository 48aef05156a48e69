"""`check` meets every kind of UPS: one error with its exit code and what to do, or everything proven."""

from __future__ import annotations

import time

import pytest

from powerguard.errors import UpsNotReady, UpsRefused, UpsUnknown, UpsUnreachable
from powerguard.node.ups_line import UpsAddress
from powerguard.node.ups_probe import discover, probe
from powerguard.sim.upsd import HEALTHY, SimUpsd


@pytest.fixture
def address(upsd):
    """Of the healthy UPS."""
    return UpsAddress.parse(upsd.address("demo"))


def test_a_healthy_ups(upsd, address):
    """Variables, version, role and logins; afterwards nobody is logged in any more."""
    upsd.describe("demo", "the rack")
    seen = probe(address, user="secondary", password="secondarypw")
    assert seen.variables == dict(HEALTHY)
    assert seen.server.startswith("Network UPS Tools upsd 2.8.0")
    assert seen.upses == {"demo": "the rack"}
    assert (seen.logged_in, seen.primary, seen.numlogins, seen.clients) == (True, False, 1, ("127.0.0.1",))
    assert upsd.asked[-1] == "LOGOUT"
    assert upsd.numlogins("demo") == 0


def test_a_primary_is_known(address):
    """A user that may command FSD is reported so, without commanding it."""
    assert probe(address, user="primary", password="primarypw").primary


def test_without_a_user(address):
    """Reading needs no user; then nothing is said of logins."""
    seen = probe(address)
    assert (seen.logged_in, seen.primary, seen.numlogins) == (False, False, 0)


def test_the_case_of_a_name_does_not_matter(upsd):
    """upsd's names are case-insensitive, and so is the check."""
    assert probe(UpsAddress("DEMO", upsd.host, upsd.port)).variables == dict(HEALTHY)


@pytest.mark.parametrize(("user", "password"), [("secondary", "wr-0ng"), ("nobody", "wr-0ng"), ("admin", "adminpw")])
def test_wrong_credentials(address, user, password):
    """A wrong password, an unknown user and one that may not LOGIN are refused, with where to look."""
    with pytest.raises(UpsRefused, match="may not log in") as caught:
        probe(address, user=user, password=password)
    assert "upsd.users" in caught.value.todo
    assert password not in str(caught.value)
    assert caught.value.exit_code == 5


def test_a_wrong_name(upsd):
    """The names that the server does have are listed."""
    upsd.replace("rack2", HEALTHY)
    with pytest.raises(UpsUnknown) as caught:
        probe(UpsAddress("rack", upsd.host, upsd.port))
    assert caught.value.todo == "it has demo, rack2; correct the name"
    assert caught.value.exit_code == 6


def test_a_server_without_ups():
    """A server with no UPS at all says so."""
    with SimUpsd() as server, pytest.raises(UpsUnknown, match="it has none"):
        probe(UpsAddress("demo", server.host, server.port))


@pytest.mark.parametrize(
    ("kind", "todo"), [("stale", "check the cable"), ("driver-gone", "upsdrvctl start demo"), ("wait", "try again")]
)
def test_a_ups_that_is_not_ready(upsd, address, kind, todo):
    """Stale, driver gone and WAIT differ in what to do."""
    upsd.fault(kind)
    with pytest.raises(UpsNotReady, match=todo) as caught:
        probe(address, user="secondary", password="secondarypw")
    assert caught.value.exit_code == 7


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["refuse", "half-open", "silent", "garbage"])
def test_a_server_that_is_none(upsd, address, kind):
    """No listener, no answer or nonsense: unreachable, in time, with where to look."""
    upsd.fault(kind, data=b"220 smtp.example ESMTP\n" if kind == "garbage" else b"")
    began = time.monotonic()
    with pytest.raises(UpsUnreachable, match="LISTEN") as caught:
        probe(address, within_s=0.3)
    assert time.monotonic() - began < 2.0
    assert caught.value.exit_code == 4
    assert str(address) in str(caught.value)


def test_discover(upsd):
    """Every UPS of a server with its description."""
    upsd.describe("demo", "the rack")
    upsd.replace("rack2", {})
    assert discover(upsd.host, upsd.port) == {"demo": "the rack", "rack2": "Description unavailable"}
    upsd.fault("refuse")
    with pytest.raises(UpsUnreachable, match=rf"^127\.0\.0\.1:{upsd.port}: "):
        discover(upsd.host, upsd.port, within_s=0.3)
