"""The keys of nodes: this one's pair, and the public keys of those that it believes, each bound to one node's name.

A folder: `node.secret` (mode 0600, never copied) and `trusted/NAME.key`, one for each other node. Both are TOML that
people can read. A key speaks for the name in its file and for no other; what isn't in the folder is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from powerguard.config import Secret
from powerguard.errors import ConfigError, DirectoryError, UsageError
from powerguard.node.addresses import is_ip, split

SECRET_FILE = "node.secret"
TRUSTED_DIR = "trusted"
SUFFIX = ".key"
FILE_MAX_BYTES = 16 * 1024
TRUSTED_MAX = 4096
"""Nodes believed; also what bounds the connections that are taken."""
ADDRESSES_MAX = 16

NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_HOST = re.compile(r"[0-9A-Za-z][0-9A-Za-z.\-]{0,252}|[0-9A-Fa-f:.]{2,45}(%[\w.\-]{1,15})?")


class Own(Struct, frozen=True):
    """This node's pair; keys are 40 characters of Z85, as ZeroMQ writes them."""

    node: str
    public: str
    secret: Secret


class Trusted(Struct, frozen=True):
    """Another node: its name, its public key, and where it may be found."""

    node: str
    public: str
    addresses: tuple[str, ...] = ()


class Keyring(Struct, frozen=True):
    """Everything in the folder. *problems*: files that aren't keys, in words; they are as if they weren't there."""

    own: Own
    trusted: dict[str, Trusted]
    problems: tuple[str, ...] = ()

    @property
    def names(self) -> dict[bytes, str]:
        """Node by the 32 bytes of its public key."""
        return {unz85(one.public): one.node for one in self.trusted.values()}


def load(folder: str | Path, node: str) -> Keyring:
    """The keys in *folder*, for the node of that name. Raises ConfigError where this node's own can't be used."""
    own = read_own(folder)
    if own.node != node:
        raise ConfigError(
            f"{Path(folder, SECRET_FILE)} is the key of {own.node!r}, and this node is {node!r}",
            todo="a key is never copied: powerguard keys generate, on this node",
        )
    trusted, problems = read_trusted(folder)
    if node in trusted or any(one.public == own.public for one in trusted.values()):
        problems = (*problems, f"this node's own key, or name, is among the trusted ones in {folder}")
    others = {name: one for name, one in trusted.items() if name != node and one.public != own.public}
    return Keyring(own, others, problems)


def read_own(folder: str | Path) -> Own:
    """This node's pair. Raises ConfigError."""
    path = Path(folder, SECRET_FILE)
    try:
        mode = path.stat().st_mode
        text = text_of(path)
    except FileNotFoundError:
        raise ConfigError(f"{path} isn't there", todo="powerguard keys generate") from None
    except (OSError, ValueError) as err:
        raise ConfigError(f"{path} can't be read: {_why(err)}", todo="give it to the user of the daemon") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{path} can be read by others than its owner", todo=f"chmod 600 {path}, or make a new key")
    table = _table(text)
    secret, public, name = table.get("secret"), table.get("public"), table.get("node")
    if not (_is_key(secret) and _is_key(public) and is_name(name)):
        raise ConfigError(f"{path} isn't a node's key", todo="powerguard keys generate --replace")
    return Own(str(name), str(public), Secret(str(secret)))


def read_trusted(folder: str | Path) -> tuple[dict[str, Trusted], tuple[str, ...]]:
    """The nodes that are believed, by name, and what is wrong with files that aren't."""
    found: dict[str, Trusted] = {}
    problems: list[str] = []
    try:
        paths = sorted(Path(folder, TRUSTED_DIR).glob(f"*{SUFFIX}"))
    except OSError as err:
        return {}, (f"{Path(folder, TRUSTED_DIR)} can't be read: {_why(err)}",)
    for path in paths:
        if len(found) >= TRUSTED_MAX:
            problems.append(f"more than {TRUSTED_MAX} keys: {path.name} and those after it aren't taken")
            break
        try:
            one = parse(text_of(path))
        except (OSError, ValueError) as err:
            problems.append(f"{path} isn't taken: {_why(err)}")
            continue
        if path.name != one.node + SUFFIX:
            problems.append(f"{path} isn't taken: it is the key of {one.node}, so its name is {one.node}{SUFFIX}")
        elif any(one.public == other.public for other in found.values()):
            problems.append(f"{path} isn't taken: another node has this key already")
        else:
            found[one.node] = one
    return found, tuple(problems)


def parse(text: str) -> Trusted:
    """A public key as `keys show` writes it. Raises ValueError, which says what is wrong."""
    table = _table(text)
    if "secret" in table:
        raise ValueError("it holds a secret key, which must never leave its node")
    name, public, addresses = table.get("node"), table.get("public"), table.get("addresses", [])
    if not is_name(name):
        raise ValueError("node isn't a name of letters, digits, '.', '-' and '_'")
    if not _is_key(public):
        raise ValueError("public isn't a key of 40 characters")
    if not isinstance(addresses, list) or len(addresses) > ADDRESSES_MAX or not all(map(is_address, addresses)):
        raise ValueError(f"addresses isn't a list of at most {ADDRESSES_MAX} host names or IP addresses")
    return Trusted(str(name), str(public), tuple(addresses))


def describe(one: Trusted) -> str:
    """The text that `parse` reads."""
    listed = ", ".join(f'"{address}"' for address in one.addresses)
    return f'node = "{one.node}"\npublic = "{one.public}"\naddresses = [{listed}]\n'


def keep_own(folder: str | Path, own: Own, *, replace: bool = False, owner: tuple[int, int] | None = None) -> Path:
    """Writes this node's pair, for *owner* (user, group) if given. Raises UsageError where there is one already."""
    path = Path(folder, SECRET_FILE)
    if not is_name(own.node):
        raise UsageError(f"{own.node!r} can't be the name of a node", todo="letters, digits, '.', '-' and '_'")
    if path.exists() and not replace:
        raise UsageError(f"{path} is there already", todo="--replace makes a new one, which the other nodes must learn")
    text = (
        "# powerguard: this node's secret key, which never leaves it. What others need: powerguard keys show\n"
        f'node = "{own.node}"\npublic = "{own.public}"\nsecret = "{own.secret.reveal()}"\n'
    )
    _make(Path(folder), owner)
    _make(Path(folder, TRUSTED_DIR), owner)
    _write(path, text, 0o600, owner)
    return path


def trust(folder: str | Path, one: Trusted, *, replace: bool = False) -> Path:
    """Believes *one* from now on. Raises UsageError where it would take another's name or key, or this node's."""
    known, _ = read_trusted(folder)
    with contextlib.suppress(ConfigError):
        own = read_own(folder)
        if own.node == one.node or own.public == one.public:
            raise UsageError(f"{one.node} is this node, or has its key", todo="trust the keys of the other nodes")
    there = known.get(one.node)
    if there is not None and there.public != one.public and not replace:
        raise UsageError(
            f"{one.node} is known by another key already", todo="--replace, if that node has made a new one"
        )
    if any(other.public == one.public and other.node != one.node for other in known.values()):
        raise UsageError(f"another node is known by the key of {one.node}", todo="each node has a key of its own")
    _make(Path(folder), None)
    _make(Path(folder, TRUSTED_DIR), None)
    path = Path(folder, TRUSTED_DIR, one.node + SUFFIX)
    _write(path, describe(one), 0o644, None)
    return path


def forget(folder: str | Path, node: str) -> None:
    """Believes it no more. Raises UsageError where it isn't known."""
    path = Path(folder, TRUSTED_DIR, node + SUFFIX)
    try:
        if not is_name(node):
            raise FileNotFoundError
        path.unlink()
    except FileNotFoundError:
        raise UsageError(f"{node!r} isn't trusted in {folder}", todo="see: powerguard keys list") from None
    except OSError as err:
        raise DirectoryError(f"{path} can't be removed: {err.strerror}", todo="use sudo") from None


def is_name(value: object) -> bool:
    """Whether *value* can be a node's name: it becomes a file's."""
    return isinstance(value, str) and NODE_NAME.fullmatch(value) is not None


def is_address(value: object) -> bool:
    """Whether *value* looks like a host name or an IP address, with a port or without."""
    host, port = split(value) if isinstance(value, str) else ("", 0)
    return _HOST.fullmatch(host) is not None and port < 65536


def unz85(key: str) -> bytes:
    """The 32 bytes of a key of 40 characters. Raises OverflowError where five characters are more than four bytes."""
    out = b""
    for start in range(0, len(key), 5):
        number = 0
        for char in key[start : start + 5]:
            number = number * 85 + _ALPHABET.index(char)
        out += number.to_bytes(4, "big")
    return out


def find(ring: Mapping[str, Trusted], address: str, resolved: Iterable[str] = ()) -> str:
    """The node that *address* (a job's master address) is of; "" where none is, or more than one could be.

    By name, by the addresses in the key files, by the name's first label, then by the addresses that it *resolved* to.
    """
    wanted = split(address)[0].rstrip(".").lower()
    listed = {name: {name.lower(), *(split(each)[0].lower() for each in one.addresses)} for name, one in ring.items()}
    first = "" if is_ip(wanted) else wanted.partition(".")[0]
    for word in (wanted, first, *(each.lower() for each in resolved)):
        found = [name for name, words in listed.items() if word and word in words]
        if len(found) == 1:
            return found[0]
    return ""


def _is_key(value: object) -> bool:
    if not isinstance(value, str) or _Z85.fullmatch(value) is None:
        return False
    try:
        return len(unz85(value)) == 32
    except OverflowError:
        return False


def _table(text: str) -> dict[str, Any]:
    """TOML, or nothing: what isn't there is said key by key."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return {}


def text_of(path: Path) -> str:
    """A key file, which is small and plain. Raises OSError or ValueError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("not a plain file")
        raw = file.read(FILE_MAX_BYTES + 1)
    if len(raw) > FILE_MAX_BYTES:
        raise ValueError(f"longer than {FILE_MAX_BYTES} bytes")
    return raw.decode()


def _why(err: Exception) -> str:
    return (err.strerror or str(err)) if isinstance(err, OSError) else str(err)


def _make(folder: Path, owner: tuple[int, int] | None) -> None:
    try:
        if not folder.is_dir():
            folder.mkdir(mode=0o755, parents=True)
            if owner is not None:
                os.chown(folder, -1, owner[1])
    except OSError as err:
        raise DirectoryError(f"{folder} can't be made: {err.strerror}", todo="use sudo, or another folder") from None


def _write(path: Path, text: str, mode: int, owner: tuple[int, int] | None) -> None:
    """Whole or not at all, and with its mode from the first instant."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, mode)
            if owner is not None:
                os.fchown(fd, *owner)
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.replace(aside, path)
    except OSError as err:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise DirectoryError(f"{path} can't be written: {err.strerror}", todo="use sudo, or another folder") from None
