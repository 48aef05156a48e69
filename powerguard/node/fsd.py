"""The forced shutdown (FSD) of everything that hangs on a UPS, commanded through upsd by a primary. Bounded."""

from __future__ import annotations

import time

from powerguard.config import UpsConfig
from powerguard.errors import PowerguardError
from powerguard.node import tls
from powerguard.node.ups_client import CheckedClient
from powerguard.node.ups_exchange import NutError
from powerguard.node.ups_line import UpsAddress

WITHIN_S = 4.0


class FsdFailed(Exception):
    """It wasn't set; the text is for people."""


def permitted(ups: UpsConfig) -> bool:
    """Whether the user of *ups* is a primary there. Commands nothing."""
    try:
        with _client(ups) as client:
            return client.is_primary(UpsAddress.parse(ups.name).ups)
    except (NutError, PowerguardError):
        return False


def command(ups: UpsConfig) -> None:
    """Sets it; it can't be taken back. Raises FsdFailed."""
    try:
        with _client(ups) as client:
            client.fsd(UpsAddress.parse(ups.name).ups)
    except (NutError, PowerguardError) as err:
        raise FsdFailed(f"{ups.name}: {err}") from None


def _client(ups: UpsConfig) -> CheckedClient:
    return CheckedClient(
        ups.host,
        ups.port,
        ups.user or None,
        ups.password.reveal() or None,
        tls=tls.context(ups),
        until=time.monotonic() + WITHIN_S,
    )
