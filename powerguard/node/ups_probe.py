"""One look at a UPS for `powerguard check`: everything is proven once, and every failure says what to do."""

from __future__ import annotations

import ssl
import time

from msgspec import Struct

from powerguard.core.types import Comm
from powerguard.errors import UpsError, UpsNotReady, UpsRefused, UpsUnknown, UpsUnreachable
from powerguard.node.ups_client import CheckedClient
from powerguard.node.ups_exchange import NutError, Refused
from powerguard.node.ups_line import PORT, UpsAddress, printable


class Probe(Struct, frozen=True):
    """What a UPS and its server said."""

    address: UpsAddress
    server: str  # upsd's version line
    upses: dict[str, str]  # every UPS of the server → its description
    variables: dict[str, str]
    logged_in: bool  # LOGIN was granted (False: no user was given)
    primary: bool  # this user may command FSD
    numlogins: int  # connections logged in, this probe's among them
    clients: tuple[str, ...]  # hosts logged in, this probe's among them
    tls: str  # "TLSv1.3", or "" in plain text
    took_s: float


def probe(
    address: UpsAddress,
    *,
    user: str | None = None,
    password: str | None = None,
    tls: ssl.SSLContext | None = None,
    within_s: float = 8.0,
) -> Probe:
    """Asks everything that the daemon will rely on, LOGIN included, and logs out again.

    Raises UpsUnreachable, UpsRefused, UpsUnknown or UpsNotReady, and ConfigError for a password that can't be sent.
    """
    began = time.monotonic()
    upses: dict[str, str] = {}
    try:
        with CheckedClient(address.host, address.port, tls=tls, until=began + within_s) as client:
            server = client.ver()
            upses = client.list_ups()
            if address.ups.casefold() not in (name.casefold() for name in upses):
                raise Refused("UNKNOWN-UPS", "unknown ups")
            primary = False
            if user is not None:
                client.authenticate(user, password or "")
                client.login(address.ups)
                primary = client.is_primary(address.ups)
            variables = client.list_vars(address.ups)
            if variables.get("ups.status", "").split() == ["WAIT"]:
                raise UpsNotReady(
                    f"{address}: the driver has just started and has no data yet", todo="try again in a few seconds"
                )
            numlogins = client.num_logins(address.ups)
            clients = client.list_clients(address.ups)[address.ups]
            return Probe(
                address=address,
                server=printable(server),
                upses=upses,
                variables={printable(name): printable(value) for name, value in variables.items()},
                logged_in=user is not None,
                primary=primary,
                numlogins=numlogins,
                clients=tuple(clients),
                tls=client.tls,
                took_s=time.monotonic() - began,
            )
    except NutError as error:
        raise explain(address, error, user=user, upses=tuple(upses)) from None


def discover(
    host: str = "localhost", port: int = PORT, *, tls: ssl.SSLContext | None = None, within_s: float = 5.0
) -> dict[str, str]:
    """The UPSes of a server: name → description. Raises UpsUnreachable or UpsRefused."""
    try:
        with CheckedClient(host, port, tls=tls, until=time.monotonic() + within_s) as client:
            return {name: printable(description) for name, description in client.list_ups().items()}
    except NutError as error:
        raise explain(UpsAddress("", host, port), error) from None


def explain(address: UpsAddress, error: NutError, *, user: str | None = None, upses: tuple[str, ...] = ()) -> UpsError:
    """*error* as an operating error, with what to do about it."""
    where, code = str(address).removeprefix("@"), error.code if isinstance(error, Refused) else ""
    what = f"{where}: {printable(str(error))}"
    if error.comm is Comm.UNREACHABLE:
        return UpsUnreachable(
            what, todo=f"check that upsd runs on {address.host}, that upsd.conf has a LISTEN line for that address "
            f"and that no firewall stops port {address.port}",
        )  # fmt: skip
    if error.comm is Comm.STALE:
        return UpsNotReady(what, todo="the driver no longer hears the UPS: check the cable, then restart the driver")
    if error.comm is Comm.DRIVER_GONE:
        return UpsNotReady(what, todo=f"start the driver on {address.host}: upsdrvctl start {address.ups}")
    if code == "UNKNOWN-UPS":
        there = f"it has {', '.join(upses)}" if upses else "it has none"
        return UpsUnknown(f"{where}: the server has no UPS of that name", todo=f"{there}; correct the name")
    if code == "CERTIFICATE":
        return UpsRefused(what, todo="give the right CA file, or a host name that is in the certificate")
    if code.startswith("FEATURE-NOT"):
        return UpsRefused(
            f"{where}: the server offers no TLS", todo="give upsd a certificate (CERTFILE, or CERTPATH), or drop tls"
        )
    if code == "ACCESS-DENIED":
        return UpsRefused(
            f"{where}: user {user!r} may not log in",
            todo="compare user and password with upsd.users: the entry needs an 'upsmon secondary' or 'upsmon primary' "
            "line, and upsd must have been reloaded since",
        )
    return UpsRefused(what, todo="look into upsd's log")
