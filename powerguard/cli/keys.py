"""`powerguard keys`: this node's key, and those of the other nodes that it believes."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from powerguard import config as configuration
from powerguard.cli.ask import ConfigFile, Json
from powerguard.cli.out import console, safe, say, say_json, warn
from powerguard.config import Config, PeersConfig
from powerguard.errors import UsageError
from powerguard.node import keyring
from powerguard.node.addresses import own_addresses
from powerguard.node.dial import new_pair
from powerguard.node.keyring import Trusted

HELP = "Keys of this node and of the others that it believes, for jobs that span nodes."
SERVICE_USER = "powerguard"

Folder = Annotated[
    Path | None, typer.Option("--dir", help="the folder of keys; default: \\[peers] keys", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Adds the commands to *app*."""
    group = typer.Typer(no_args_is_help=True, help=HELP)
    group.command()(generate)
    group.command()(show)
    group.command()(trust)
    group.command()(forget)
    group.command("list")(listing)
    app.add_typer(group, name="keys")


def generate(
    folder: Folder = None,
    file: ConfigFile = None,
    node: Annotated[
        str, typer.Option("--node", help="its name; default: \\[node] name, or the host's", show_default=False)
    ] = "",
    replace: Annotated[bool, typer.Option("--replace", help="instead of the key that is there")] = False,
) -> None:
    """Make this node's key: its secret stays here, readable to the daemon alone."""
    config = _config(file)
    name = node or (config.node.name if config else os.uname().nodename)
    path = keyring.keep_own(_folder(folder, config), new_pair(name), replace=replace, owner=_owner())
    say(
        f"{path}: the key of {name}; on the other nodes: powerguard keys trust, with what `powerguard keys show` prints"
    )


def show(
    folder: Folder = None,
    file: ConfigFile = None,
    address: Annotated[
        list[str] | None,
        typer.Option("--address", help="where others reach this node; default: all it has", show_default=False),
    ] = None,
) -> None:
    """Print what other nodes need to believe this one: its public key, its name, its addresses."""
    config = _config(file)
    own = keyring.read_own(_folder(folder, config))
    known = (config.peers.address,) if config and config.peers.address else own_addresses()
    addresses = tuple(address or known)[: keyring.ADDRESSES_MAX]
    for each in addresses:
        if not keyring.is_address(each):
            raise UsageError(f"{each!r} isn't an address", todo="a host name, or an IP address")
    sys.stdout.write(keyring.describe(Trusted(own.node, own.public, addresses)))


def trust(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="what `keys show` printed; - reads it", show_default=False)
    ],
    folder: Folder = None,
    file: ConfigFile = None,
    replace: Annotated[bool, typer.Option("--replace", help="a node that is known has a new key")] = False,
) -> None:
    """Believe other nodes from now on. A running daemon takes it with `systemctl reload powerguard`."""
    where = _folder(folder, _config(file))
    found = [(name, _read(name)) for name in files]  # all are read before any is believed
    for _, one in found:
        path = keyring.trust(where, one, replace=replace)
        say(f"{path}: {one.node} is believed, at {', '.join(one.addresses) or 'its name'}")


def forget(
    nodes: Annotated[list[str], typer.Argument(metavar="NODE...", show_default=False)],
    folder: Folder = None,
    file: ConfigFile = None,
) -> None:
    """Believe nodes no more. A running daemon takes it with `systemctl reload powerguard`."""
    where = _folder(folder, _config(file))
    for node in nodes:
        keyring.forget(where, node)
        say(f"{node} is believed no more")


def listing(folder: Folder = None, file: ConfigFile = None, as_json: Json = False) -> None:
    """List the nodes that this one believes."""
    trusted, problems = keyring.read_trusted(_folder(folder, _config(file)))
    if as_json:
        say_json({"trusted": list(trusted.values()), "problems": problems})
        return
    table = Table(box=None, pad_edge=False)
    for column in ("node", "public key", "addresses"):
        table.add_column(column)
    for one in trusted.values():
        table.add_row(safe(one.node), safe(one.public), safe(", ".join(one.addresses) or "-"))
    console().print(table)
    for problem in problems:
        warn(problem)


def _read(name: str) -> Trusted:
    try:
        text = sys.stdin.read(keyring.FILE_MAX_BYTES) if name == "-" else keyring.text_of(Path(name))
        return keyring.parse(text)
    except (OSError, ValueError) as err:
        why = err.strerror if isinstance(err, OSError) else str(err)
        raise UsageError(f"{name} isn't a public key: {why}", todo="powerguard keys show, on that node") from None


def _config(file: Path | None) -> Config | None:
    return configuration.load(file, secrets=False) if file is not None else None


def _folder(folder: Path | None, config: Config | None) -> Path:
    return folder or Path(config.peers.keys if config else PeersConfig().keys)


def _owner() -> tuple[int, int] | None:
    """The daemon's user, where root makes the key and there is one."""
    if os.geteuid() != 0:
        return None
    try:
        user = pwd.getpwnam(SERVICE_USER)
    except KeyError:
        return None
    return user.pw_uid, user.pw_gid
