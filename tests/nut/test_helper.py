"""The private NUT itself: no child is left, every edit is seen, and what is missing is said."""

from __future__ import annotations

import os
import signal

import pytest

from powerguard.errors import MissingDependency, PowerguardError
from powerguard.sim.nut import RealNut, find, missing


def test_what_is_missing_is_said():
    """A program that isn't there is named, with the package to install."""
    with pytest.raises(MissingDependency, match="apt-get install nut-server"):
        find("no-such-driver")
    assert "no-such-driver" in missing("upsd", "no-such-driver")
    assert missing() == ""


def test_the_wrapper_is_not_taken_for_upsd():
    """Debian's /usr/sbin/upsd does nothing; the real one is found."""
    assert find("upsd").read_bytes()[:4] == b"\x7fELF"


def test_edits_within_one_second_are_all_seen(nut, eventually):
    """dummy-ups compares whole seconds of the file's time; each edit gets a new one."""
    for charge in ("80", "79", "78"):
        nut.set("other", {"battery.charge": charge})
    eventually(lambda: nut.ask("GET VAR other battery.charge") == 'VAR other battery.charge "78"')
    nut.set("other", {"battery.charge": "100"})


@pytest.mark.parametrize("value", ["", 'a"b', "a#b", "a\\b", "a\nb"])
def test_what_dummy_ups_would_garble_is_refused(nut, value):
    """Values that dummy-ups doesn't read back are refused, not written."""
    with pytest.raises(ValueError, match="can't show"):
        nut.set("other", {"ups.model": value})


def test_a_child_that_fails_is_reported_with_its_words(nut):
    """A driver that ends at once raises with what it printed."""
    nut.stop("other")
    device = nut.directory / "etc" / "other.dev"
    hidden = device.rename(device.with_suffix(".away"))
    conf = (nut.directory / "etc" / "ups.conf").read_text()
    (nut.directory / "etc" / "ups.conf").write_text(conf.replace("[other]", "[gone]"))
    try:
        with pytest.raises(PowerguardError, match="the driver of other to open its socket: ended with"):
            nut.start_driver("other")
    finally:
        (nut.directory / "etc" / "ups.conf").write_text(conf)
        hidden.rename(device)
        nut.stop("other")
    nut.start_driver("other")
    nut.wait_ready("other")


def test_no_child_is_left():
    """After the end every child is gone and so is the directory, even if one hangs or was killed."""
    with RealNut({"demo": {"ups.status": "OL"}}, ready=False) as nut:
        pids = [child.pid for child in nut._children.values()]
        directory = nut.directory
        nut.send("demo", signal.SIGSTOP)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not directory.exists()
