"""A rank's own part in a drill: what nobody can do to a process from outside, done by itself when it is asked.

`python -m powerguard.drill.accomplice MODULE ARGS` runs a training script as it is. One real-time signal begins a
fault in its main thread, `END` ends it. The ends are waited for, blocked, by every thread: so no clock, and no file, is
between the drill and the fault.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import time
from types import FrameType

from powerguard.sim import faults as f

END = signal.Signals(signal.SIGRTMIN) + 7
BEGIN: dict[type[f.RankFault], int] = {
    f.InEval: signal.SIGRTMIN + 4,
    f.GilHeld: signal.SIGRTMIN + 5,
    f.InCompile: signal.SIGRTMIN + 6,
}
LATE = "POWERGUARD_DRILL_LATE"
"""Environment: `RANK:SECONDS` of a rank that starts later than the others."""

_COMPILE_S = 1.0
_with_gil = ctypes.PyDLL(None)  # its functions are called without giving the interpreter away


def late(faults: tuple[f.Fault, ...]) -> str:
    """What `LATE` must hold for them; "" if nobody is late."""
    return next((f"{each.rank}:{each.at:g}" for each in faults if isinstance(each, f.LateJoiner)), "")


def main() -> None:
    """Takes part, and runs the module."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {END})  # first: threads inherit it
    for kind, deed in ((f.InEval, _away), (f.GilHeld, _hold), (f.InCompile, _compile)):
        signal.signal(BEGIN[kind], deed)
    rank, colon, seconds = os.environ.get(LATE, "").partition(":")
    if colon and rank == os.environ.get("RANK"):
        time.sleep(float(seconds))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _away(_number: int, _frame: FrameType | None) -> None:
    """The main thread is busy elsewhere, every other thread runs."""
    signal.sigwait({END})


def _hold(_number: int, _frame: FrameType | None) -> None:
    """No thread of this process runs Python."""
    ends, which = ctypes.create_string_buffer(128), ctypes.c_int()  # a sigset_t
    _with_gil.sigemptyset(ends)
    _with_gil.sigaddset(ends, int(END))
    _with_gil.sigwait(ends, ctypes.byref(which))


def _compile(_number: int, _frame: FrameType | None) -> None:
    """The main thread is busy; the others run every other second."""
    while signal.sigtimedwait({END}, _COMPILE_S) is None:
        _with_gil.usleep(int(1e6 * _COMPILE_S))


if __name__ == "__main__":
    main()
