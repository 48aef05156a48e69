"""`powerguard status --watch`: the page once a second, for as long as somebody looks. Asking changes nothing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from powerguard.cli import show
from powerguard.cli.out import console, say_json
from powerguard.errors import DaemonUnreachable
from powerguard.node.status import Status

EVERY_S = 1.0


def run(fetch: Callable[[], Status], *, as_json: bool = False) -> None:
    """Shows what *fetch* gives until Ctrl-C, which is how it is meant to end.

    Raises DaemonUnreachable if there is no daemon to begin with; one that goes away later is waited for.
    """
    last = fetch()
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            _lines(fetch, last, say_json)
        elif console().is_terminal:
            _pages(fetch, last)
        else:
            _lines(fetch, last, show.once)


def _lines(fetch: Callable[[], Status], last: Status, tell: Callable[[Status], None]) -> None:
    while True:
        tell(last)
        sys.stdout.flush()
        time.sleep(EVERY_S)
        with contextlib.suppress(DaemonUnreachable):
            last = fetch()


def _pages(fetch: Callable[[], Status], last: Status) -> None:
    with Live(_page(last), console=console(), auto_refresh=False, screen=True, vertical_overflow="crop") as live:
        while True:
            time.sleep(EVERY_S)
            try:
                last = fetch()
                shown = _page(last)
            except DaemonUnreachable as error:
                shown = Group(Text(f"no answer: {error}; as it was:", style="bold red"), show.page(last))
            live.update(shown, refresh=True)


def _page(now: Status) -> RenderableType:
    return show.page(now, time.strftime("%H:%M:%S"))
