"""Power limits on a fake NVML: lowered, put back as they were found, whatever comes in between."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerguard.errors import PowerguardError
from powerguard.generations.disk import Disk
from powerguard.node.gpus import Limits, Note, look
from powerguard.sim import nvml as fake
from powerguard.sim.nvml import FakeGpu, FakeNvml

BOOT = "boot-1"


def limits_of(nvml: FakeNvml) -> list[float]:
    return [gpu.limit_w for gpu in nvml.gpus]


def test_lowered_and_restored(tmp_path):
    """60 % of the default for each, and back to what was found, also where that wasn't the default."""
    nvml = FakeNvml([FakeGpu(), FakeGpu(limit_w=650.0), FakeGpu(limit_w=300.0)])
    limits = Limits(tmp_path / "note.json", BOOT, nvml)
    lowered = limits.lower(60.0)

    assert [420.0, 420.0, 300.0] == limits_of(nvml)  # a limit is never raised
    assert ("GPU 0: 700 W -> 420 W", "GPU 1: 650 W -> 420 W") == lowered.done
    assert limits.lowered
    assert () == limits.lower(60.0).done
    assert ("GPU 0: 420 W -> 700 W", "GPU 1: 420 W -> 650 W") == limits.restore().done
    assert [700.0, 650.0, 300.0] == limits_of(nvml)
    assert not limits.lowered
    assert not (tmp_path / "note.json").exists()
    assert 0 == nvml.inits


def test_another_percentage_starts_from_what_was_found(tmp_path):
    """Lower, lower still, a bit higher: each by the limit that was there before the first."""
    nvml = FakeNvml([FakeGpu(limit_w=650.0)])
    limits = Limits(tmp_path / "note.json", BOOT, nvml)
    seen = [(limits.lower(pct), limits_of(nvml))[1] for pct in (60.0, 40.0, 80.0, 100.0)]
    limits.restore()

    assert [[420.0], [280.0], [560.0], [650.0]] == seen
    assert [650.0] == limits_of(nvml)


def test_never_below_what_the_gpu_allows(tmp_path):
    """Its least limit is the floor."""
    nvml = FakeNvml([FakeGpu(least_w=400.0)])
    Limits(tmp_path / "note.json", BOOT, nvml).lower(20.0)

    assert [400.0] == limits_of(nvml)


class Killed(Exception):
    """The process ends here."""


class DyingNvml(FakeNvml):
    """The n-th call that sets a limit is the last thing that the process does."""

    def __init__(self, gpus, dies_at: int) -> None:
        super().__init__(gpus)
        self.left = dies_at

    def nvmlDeviceSetPowerManagementLimit(self, handle, limit) -> None:  # noqa: N802 - the library's name
        if self.left == 0:
            raise Killed
        self.left -= 1
        super().nvmlDeviceSetPowerManagementLimit(handle, limit)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["lower", "restore"]), st.integers(0, 4)), min_size=1, max_size=6))
def test_killed_at_any_call_the_limits_come_back(tmp_path_factory, deaths):
    """However often whoever changes limits is killed, and wherever: the next one restores what was found first."""
    path = tmp_path_factory.mktemp("note") / "note.json"
    gpus = [FakeGpu(limit_w=limit) for limit in (700.0, 650.0, 500.0)]
    for what, at in deaths:
        limits = Limits(path, BOOT, DyingNvml(gpus, at))
        with contextlib.suppress(Killed):
            limits.lower(60.0) if what == "lower" else limits.restore()
    Limits(path, BOOT, FakeNvml(gpus)).restore()

    assert [700.0, 650.0, 500.0] == [gpu.limit_w for gpu in gpus]


class FailingDisk(Disk):
    """No byte reaches it."""

    def fsync(self, fd: int) -> None:  # noqa: ARG002
        raise OSError(errno.EIO, "Input/output error")


def test_no_note_no_change(tmp_path):
    """Where the limits found can't be made durable nothing is lowered."""
    nvml = FakeNvml([FakeGpu()])
    limits = Limits(tmp_path / "note.json", BOOT, nvml, FailingDisk())

    with pytest.raises(PowerguardError, match="can't be written"):
        limits.lower(60.0)
    assert [] == nvml.gpus[0].set_to


def test_a_note_of_another_boot_is_dropped(tmp_path):
    """A reboot has reset the limits; what was found before it means nothing."""
    nvml = FakeNvml([FakeGpu()])
    Limits(tmp_path / "note.json", "boot-0", nvml).lower(60.0)
    nvml.gpus[0].limit_w = 700.0
    limits = Limits(tmp_path / "note.json", BOOT, nvml)

    assert not limits.lowered
    assert () == limits.restore().done
    assert not (tmp_path / "note.json").exists()


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_in_the_note_are_no_note(tmp_path_factory, raw):
    """Torn, foreign or hostile: nothing is restored from it, and nothing is raised."""
    path = tmp_path_factory.mktemp("note") / "note.json"
    path.write_bytes(raw)
    nvml = FakeNvml([FakeGpu()])

    assert () == Limits(path, BOOT, nvml).restore().done
    assert [700.0] == limits_of(nvml)


def test_what_somebody_changed_meanwhile_is_left(tmp_path):
    """A limit that isn't the one we put there is somebody's word."""
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    limits = Limits(tmp_path / "note.json", BOOT, nvml)
    limits.lower(60.0)
    nvml.gpus[0].limit_w = 500.0

    assert "somebody has changed it" in limits.restore().done[0]
    assert [500.0, 700.0] == limits_of(nvml)


def test_one_that_fails_is_said_and_kept_for_later(tmp_path):
    """Others are restored; the lost one stays in the note until it can be."""
    nvml = FakeNvml([FakeGpu(), FakeGpu(), FakeGpu(locked=True), FakeGpu(fixed=True)])
    limits = Limits(tmp_path / "note.json", BOOT, nvml)
    lowered = limits.lower(60.0)

    assert ("GPU 2: Insufficient Permissions",) == lowered.failed
    assert "GPU 3 stays as it is: its power can't be limited" in lowered.done
    nvml.gpus[1].lost = True
    assert (f"{nvml.gpus[1].uuid} isn't there",) == limits.restore().failed
    assert 700.0 == nvml.gpus[0].limit_w
    assert limits.lowered
    nvml.gpus[1].lost = False
    assert ("GPU 1: 420 W -> 700 W",) == limits.restore().done
    assert not limits.lowered


def test_without_a_driver_it_is_said(tmp_path):
    """NVML's own words, and what to do."""
    with pytest.raises(PowerguardError, match="NVML Shared Library Not Found") as caught:
        Limits(tmp_path / "note.json", BOOT, FakeNvml(missing=True)).lower(60.0)
    assert caught.value.todo


def test_what_it_would_save():
    """Draw above the new limit is saved; a GPU that idles saves nothing."""
    gpus = look(FakeNvml([FakeGpu(wants_w=640.0), FakeGpu(wants_w=100.0), FakeGpu(lost=True)]))

    assert [220.0, 0.0] == [gpu.saved_w(60.0) for gpu in gpus]


def test_the_note_is_readable_by_people(tmp_path):
    """JSON with the UUID and milliwatts, as NVML has them."""
    nvml = FakeNvml([FakeGpu(uuid="GPU-1")])
    Limits(tmp_path / "note.json", BOOT, nvml).lower(60.0)

    assert 700000 == msgspec.json.decode((tmp_path / "note.json").read_bytes(), type=Note).limits["GPU-1"].found_mw


def test_the_fake_has_the_words_of_the_real_library():
    """Every name of the fake is one of pynvml's, with as many parameters, and the codes are the same."""
    real = pytest.importorskip("pynvml")
    names = [name for name in dir(FakeNvml) if name.startswith("nvml")]

    assert len(names) >= 10
    for name in names:
        ours = getattr(FakeNvml, name).__code__.co_argcount - 1
        theirs = getattr(real, name)
        assert ours == getattr(theirs, "__wrapped__", theirs).__code__.co_argcount, name
    codes = {name: value for name, value in vars(fake).items() if name.startswith("NVML_ERROR_")}
    assert codes == {name: getattr(real, name) for name in codes}
    assert all(str(fake.NVMLError(code)) == str(real.NVMLError(code)) for code in codes.values())


def test_a_real_library_without_a_driver_says_so():
    """Where there is no NVIDIA driver, the real pynvml leads to one clear error."""
    real = pytest.importorskip("pynvml")
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("there is a driver")

    with pytest.raises(PowerguardError, match="NVML"):
        look(real)
