"""Operating errors: each has an exit code and says what to do. Programmer errors are asserts.

::

    PowerguardError                  1   something went wrong that has no better word
    ├── UsageError                   2   the command line is wrong
    ├── ConfigError                  3   the configuration is wrong; every problem is listed
    ├── UpsError                         a UPS can't be used
    │   ├── UpsUnreachable           4   no upsd there, or it doesn't answer
    │   ├── UpsRefused               5   wrong user, password or certificate
    │   ├── UpsUnknown               6   upsd has no UPS of that name
    │   └── UpsNotReady              7   upsd answers, the driver doesn't (stale, gone, WAIT)
    ├── DirectoryError               8   a directory can't be written, or has no room
    ├── HaltNotPermitted             9   this user may not power the node off
    ├── DaemonUnreachable           10   no daemon answers on its socket
    ├── JournalError                11   a journal can't be read
    ├── CheckpointError             12   no generation is whole, or one asked for isn't
    ├── StateError                  13   the training state can't be saved or loaded as it is
    ├── MissingDependency           14   an optional package isn't installed
    ├── CannotCarry                 15   `check`: this UPS can't carry this job
    ├── DrillFailed                 16   a drill ran and its verdict isn't "survived"
    ├── NotReady                    17   `wait-ready`: the batteries don't carry a flush and a halt yet
    └── InvariantError              70   a decision broke a law: powerguard's own fault

A rank that left because its node halts exits with 75 (`EXIT_REQUEUE`), for schedulers to requeue on.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_REQUEUE = 75
"""EX_TEMPFAIL of sysexits.h: "try again later"."""


class PowerguardError(Exception):
    """Base; *todo* says what to do about it."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, todo: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.todo = todo

    def __str__(self) -> str:
        return f"{self.message}; {self.todo}" if self.todo else self.message


class UsageError(PowerguardError):
    """The command line is wrong."""

    exit_code = 2


class ConfigError(PowerguardError):
    """The configuration is wrong; *problems* lists every one of them."""

    exit_code = 3

    def __init__(self, message: str, *, problems: tuple[str, ...] = (), todo: str = "") -> None:
        super().__init__(message, todo=todo)
        self.problems = problems


class UpsError(PowerguardError):
    """A UPS can't be used."""


class UpsUnreachable(UpsError):
    """No upsd there, or it doesn't answer in time."""

    exit_code = 4


class UpsRefused(UpsError):
    """Wrong user, password or certificate."""

    exit_code = 5


class UpsUnknown(UpsError):
    """The server has no UPS of that name."""

    exit_code = 6


class UpsNotReady(UpsError):
    """The server answers, the driver doesn't: stale, gone or still waiting."""

    exit_code = 7


class DirectoryError(PowerguardError):
    """A directory can't be written, or has no room."""

    exit_code = 8


class HaltNotPermitted(PowerguardError):
    """This user may not power the node off by the configured method."""

    exit_code = 9


class DaemonUnreachable(PowerguardError):
    """No daemon answers on its socket."""

    exit_code = 10


class JournalError(PowerguardError):
    """A journal can't be read."""

    exit_code = 11


class CheckpointError(PowerguardError):
    """No generation is whole, or the one asked for isn't."""

    exit_code = 12


class StateError(PowerguardError):
    """The training state can't be saved or loaded as it is."""

    exit_code = 13


class MissingDependency(PowerguardError):
    """An optional package isn't installed; *todo* names the extra."""

    exit_code = 14


class CannotCarry(PowerguardError):
    """This UPS can't carry this job."""

    exit_code = 15


class DrillFailed(PowerguardError):
    """A drill ran and its verdict isn't "survived"."""

    exit_code = 16


class NotReady(PowerguardError):
    """The batteries don't carry a flush and a halt yet."""

    exit_code = 17


class InvariantError(PowerguardError):
    """A decision broke a law of `core/lawful.py`: powerguard's own fault."""

    exit_code = 70
