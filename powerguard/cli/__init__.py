"""The command line. `main` is the entry point; each group of commands has a file of its own.

An operator's mistake is one line on standard error and an exit code of the table (`exit_codes.py`), never a traceback.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import NoReturn

from powerguard.cli.stdout import OutputLost, give_up, known
from powerguard.errors import ConfigError, MissingDependency, PowerguardError, UsageError

INTERRUPTED = 130
"""128 + SIGINT, as shells say it."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits with its code."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """The exit code of one command."""
    with known():
        code = _code(arguments)
        return code if _flushed() else PowerguardError.exit_code


def _code(arguments: list[str]) -> int:
    debug = "--debug" in arguments[:1] or os.environ.get("POWERGUARD_DEBUG") == "1"
    try:
        return _invoke(arguments)
    except PowerguardError as err:
        if debug:
            traceback.print_exc()
        return _tell(err)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        give_up()
        return 0
    except OutputLost as err:
        return _lost(err)
    except Exception as err:
        if debug or arguments[:1] == ["run"]:  # a service's standard error is its log: there it is kept
            traceback.print_exc()
            return PowerguardError.exit_code
        return _unexpected(err)


def _invoke(arguments: list[str]) -> int:
    try:
        from powerguard.cli.app import call
    except ImportError as err:
        if err.name is not None and err.name.split(".")[0] in ("typer", "rich"):
            raise MissingDependency(f"{err.name} isn't installed", todo="pip install 'powerguard[node]'") from None
        raise
    return call(arguments)


def _flushed() -> bool:
    """Whether standard output has everything that was said, or a reader who didn't want it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        give_up()
    except OutputLost as err:
        _lost(err)
        return False
    return True


def _lost(err: OutputLost) -> int:
    give_up()
    return _tell(PowerguardError(f"can't write to standard output: {err.strerror or err}"))


def _tell(err: PowerguardError) -> int:
    """One line, or for a configuration one for each problem."""
    if isinstance(err, UsageError) or not isinstance(err, ConfigError) or len(err.problems) == 0:
        _line(f"powerguard: {err}")
    else:
        for problem in err.problems:
            _line(f"powerguard: {problem}")
    return err.exit_code


def _unexpected(err: Exception) -> int:
    fd, path = tempfile.mkstemp(prefix="powerguard-traceback-", suffix=".txt")
    with os.fdopen(fd, "w") as file:
        traceback.print_exc(file=file)
    what = " ".join(f"{type(err).__name__}: {err}".split())[:300]
    _line(f"powerguard: internal error: {what}; please report it with {path} (--debug shows it here)")
    return PowerguardError.exit_code


def _line(text: str) -> None:
    sys.stderr.write(" ".join(text.splitlines()) + "\n")
