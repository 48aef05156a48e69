"""What every outlet has, and how it fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from powerguard.errors import ConfigError, PowerguardError

ASK_EVERY_S = 0.1


class OutletFailed(PowerguardError):
    """An outlet can't be switched, or doesn't do what it was told."""


class Named(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="driver"):
    """*name* in this rig, and in words what hangs on it, which is shown to the person before it is switched.

    *settle_s*: within this it must say that it did as it was told. A relay takes less than a second, a PDU may hold an
    outlet back for its neighbours.
    """

    name: str
    feeds: str
    settle_s: float = 10.0


def wait_for(on: bool, state: Callable[[], bool], outlet: Named) -> None:
    """Until *outlet* itself says that it is *on* (or off). OutletFailed if it doesn't."""
    ends = time.monotonic() + outlet.settle_s
    while state() is not on:
        if time.monotonic() > ends:
            told, is_now = ("on", "off") if on else ("off", "on")
            raise OutletFailed(
                f"{outlet.name} was told to go {told} and says that it is {is_now}", todo="switch it by hand"
            )
        time.sleep(ASK_EVERY_S)


def secret(path: str) -> str:
    """The password alone in the file at *path*; "" for no path. Raises ConfigError."""
    if not path:
        return ""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}", todo="a file that holds the password alone") from None
