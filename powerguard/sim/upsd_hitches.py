"""How an answer goes wrong on its way: which fault is due at a question, and the answer sent as that fault has it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import replace

from powerguard.sim.upsd_faults import Fault


class Hitches:
    """The faults of answers that hold now; the caller holds the lock."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """One more; the first one that is due counts."""
        self._faults.append(fault)

    def end(self, ups: str) -> None:
        """Those of *ups* end; without a name all of them."""
        self._faults = [fault for fault in self._faults if ups and fault.ups.casefold() != ups.casefold()]

    def due(self, question: list[str]) -> Fault | None:
        """What goes wrong with the answer to *question*; one that is limited in number is used up by it."""
        for index, fault in enumerate(self._faults):
            if fault.meets(question):
                if fault.times is not None:
                    left = fault.times - 1
                    self._faults[index : index + 1] = [replace(fault, times=left)] if left > 0 else []
                return fault
        return None


def send(
    connection: socket.socket, lines: list[str], fault: Fault | None, about: str, wait: Callable[[float], bool]
) -> bool:
    """Sends the answer about the UPS *about* as *fault* has it; False: the connection ends here.

    *wait* waits for so many seconds, and is true if the server ends meanwhile.
    """
    pieces = [f"{line}\n".encode("utf-8", "surrogateescape") for line in lines]
    if fault is None:
        for piece in pieces:  # one write a line, as upsd does
            connection.sendall(piece)
        return True
    whole = fault.data or b"".join(pieces)
    match fault.kind:
        case "silent":
            return True
        case "late":
            wait(fault.seconds)
            connection.sendall(whole)
        case "drip":
            for code in whole:
                connection.sendall(bytes((code,)))
                if wait(fault.seconds):
                    return False
        case "garbage":
            connection.sendall(whole)
        case "wrong":
            connection.sendall(_about_another(whole, about))
        case "cut" | "drop" | "reset":
            connection.sendall(whole[: 0 if fault.kind == "drop" else fault.after])
            if fault.kind == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
    return True


def _about_another(answer: bytes, about: str) -> bytes:
    """The same answer about a UPS called `another`."""
    for end in (b" ", b"\n") if about else ():
        answer = answer.replace(f" {about}".encode() + end, b" another" + end)
    return answer
