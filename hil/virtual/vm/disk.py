"""A disk with a volatile write cache, for QEMU: what was written is lost at a power cut unless it was flushed.

QEMU's own `cache=` settings are no model of this: whatever they say, what QEMU has written lies in the host's page
cache and survives the end of QEMU. So the disk is a server of its own (NBD, over a Unix socket), in this process.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

BLOCK = 4096
_MAGIC, _OPTION, _REPLY = 0x4E42444D41474943, 0x49484156454F5054, 0x3E889045565A9
_REQUEST, _ANSWER = 0x25609513, 0x67446698
_FIXED_NEWSTYLE, _HAS_FLAGS, _CAN_FLUSH, _CAN_FUA = 1, 1, 4, 8
_FLAGS = _HAS_FLAGS | _CAN_FLUSH | _CAN_FUA
_EXPORT_NAME, _ABORT, _INFO, _GO = 1, 2, 6, 7
_READ, _WRITE, _DISCONNECT, _FLUSH = 0, 1, 2, 3
_ACK, _INFO_EXPORT, _UNSUPPORTED = 1, 3, 0x80000001
_FUA = 1
_EINVAL = 22


class VolatileDisk:
    """Serves *image*, which is never changed: what is durable and what isn't yet are both in memory.

    A cut loses what isn't flushed, but for each 4 KiB block with probability *keep*: caches write in any order.
    """

    def __init__(self, image: Path, path: Path, seed: int = 1) -> None:
        self.address = path
        self.flushes = self.cuts = self.lost_blocks = 0
        self._image = os.open(image, os.O_RDONLY)
        self._size = os.fstat(self._image).st_size
        self._durable: dict[int, bytes] = {}
        self._cached: dict[int, bytes] = {}
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._trap: tuple[int, Callable[[], None]] | None = None
        self._dead = False
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="disk")
        self._thread.start()

    # ---- power -------------------------------------------------------------------------------------

    @property
    def unflushed_bytes(self) -> int:
        """What a cut would lose now."""
        return BLOCK * len(self._cached)

    def cut(self, keep: float = 0.0) -> int:
        """The power is gone; the number of blocks that were lost. Until `power_on` nothing is served."""
        with self._lock:
            return self._cut(keep)

    def _cut(self, keep: float) -> int:
        kept = {block: data for block, data in sorted(self._cached.items()) if self._dice.random() < keep}
        lost = len(self._cached) - len(kept)
        self._durable.update(kept)
        self._cached.clear()
        self._dead, self._trap = True, None
        self.cuts += 1
        self.lost_blocks += lost
        self._hang_up()
        return lost

    def _hang_up(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def power_on(self) -> None:
        """Serves again."""
        self._dead = False

    def cut_at(self, unflushed_bytes: int, then: Callable[[], None], keep: float = 0.5) -> None:
        """The power goes in the middle of a write, once so much is written and not flushed; *then* is called."""

        def fall() -> None:
            self._cut(keep)
            then()

        with self._lock:
            self._trap = (unflushed_bytes, fall)

    def save(self, path: Path) -> None:
        """What is durable, as an image: what somebody finds who takes the disk out."""
        with self._lock, path.open("wb") as out:
            offset = 0
            while offset < self._size:  # holes stay holes
                try:
                    begin = os.lseek(self._image, offset, os.SEEK_DATA)
                except OSError:
                    break
                end = os.lseek(self._image, begin, os.SEEK_HOLE)
                for at in range(begin, end, 1 << 20):
                    out.seek(at)
                    out.write(os.pread(self._image, min(1 << 20, end - at), at))
                offset = end
            for block, data in self._durable.items():
                out.seek(block * BLOCK)
                out.write(data)
            out.truncate(self._size)

    def close(self) -> None:
        """Nothing is left of it."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._hang_up()
        self._thread.join(10)
        os.close(self._image)
        self.address.unlink(missing_ok=True)

    # ---- blocks ------------------------------------------------------------------------------------

    def read(self, offset: int, length: int) -> bytes:
        """As the computer sees it."""
        first, last = offset // BLOCK, (offset + length - 1) // BLOCK
        whole = bytearray(os.pread(self._image, (last - first + 1) * BLOCK, first * BLOCK))
        for block in range(first, last + 1):
            data = self._cached.get(block) or self._durable.get(block)
            if data is not None:
                at = (block - first) * BLOCK
                whole[at : at + BLOCK] = data
        begin = offset - first * BLOCK
        return bytes(whole[begin : begin + length])

    def write(self, offset: int, data: bytes) -> None:
        """Into the cache."""
        begin = offset - offset % BLOCK
        end = -(-(offset + len(data)) // BLOCK) * BLOCK
        whole = data
        if (begin, end) != (offset, offset + len(data)):
            around = self.read(begin, end - begin)
            whole = around[: offset - begin] + data + around[offset - begin + len(data) :]
        for at in range(0, end - begin, BLOCK):
            self._cached[(begin + at) // BLOCK] = whole[at : at + BLOCK]

    def flush(self) -> None:
        """Everything is durable."""
        self._durable.update(self._cached)
        self._cached.clear()
        self.flushes += 1

    # ---- NBD ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._connection = connection
            with connection, contextlib.suppress(OSError, EOFError):
                if self._agree(connection):
                    self._obey(connection)

    def _agree(self, peer: socket.socket) -> bool:
        """The handshake, fixed newstyle; whether requests follow."""
        peer.sendall(struct.pack(">QQH", _MAGIC, _OPTION, _FIXED_NEWSTYLE))
        _exactly(peer, 4)
        while True:
            _, option, length = struct.unpack(">QII", _exactly(peer, 16))
            _exactly(peer, length)
            if option == _EXPORT_NAME:
                peer.sendall(struct.pack(">QH", self._size, _FLAGS) + bytes(124))
                return True
            if option in (_INFO, _GO):
                info = struct.pack(">HQH", 0, self._size, _FLAGS)
                peer.sendall(struct.pack(">QIII", _REPLY, option, _INFO_EXPORT, len(info)) + info)
                peer.sendall(struct.pack(">QIII", _REPLY, option, _ACK, 0))
                if option == _GO:
                    return True
            elif option == _ABORT:
                return False
            else:
                peer.sendall(struct.pack(">QIII", _REPLY, option, _UNSUPPORTED, 0))

    def _obey(self, peer: socket.socket) -> None:
        while True:
            magic, flags, kind, handle, offset, length = struct.unpack(">IHHQQI", _exactly(peer, 28))
            if magic != _REQUEST or kind == _DISCONNECT:
                return
            data = _exactly(peer, length) if kind == _WRITE else b""
            with self._lock:
                if self._dead:
                    return
                error, answer = self._do(kind, flags, offset, length, data)
                if self._trap is not None and self.unflushed_bytes >= self._trap[0]:
                    self._trap[1]()
                    return
            peer.sendall(struct.pack(">IIQ", _ANSWER, error, handle) + answer)

    def _do(self, kind: int, flags: int, offset: int, length: int, data: bytes) -> tuple[int, bytes]:
        """(error, data) of one request."""
        if kind == _READ:
            return 0, self.read(offset, length)
        if kind == _WRITE:
            self.write(offset, data)
            if flags & _FUA:
                for block in range(offset // BLOCK, (offset + length - 1) // BLOCK + 1):
                    self._durable[block] = self._cached.pop(block)
            return 0, b""
        if kind == _FLUSH:
            self.flush()
            return 0, b""
        return _EINVAL, b""


def _exactly(peer: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = peer.recv(min(length, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
