"""The language of upsd's lines: how a question is taken apart and how a value is quoted, as in NUT's parseconf.c."""

from __future__ import annotations


def quoted(value: str) -> str:
    """As pconf_encode does: backslash, quote and # are escaped."""
    for mark in '\\"#':
        value = value.replace(mark, "\\" + mark)
    return f'"{value}"'


def take_question(buffer: bytearray) -> list[str] | None:
    """Takes the next whole question off *buffer*; None while there is none.

    The grammar of NUT's parseconf.c: a question goes on while a quote is open, `#` starts a comment outside of
    quotes and spoils the line (which then has no answer) inside, and what isn't printable ASCII is dropped.
    """
    found: list[bytearray] = []
    word: bytearray | None = None
    state = "between"
    for at, code in enumerate(buffer):
        char = bytes((code,))
        kept = char if 0x20 <= code <= 0x7F else b""
        if state.endswith("literal"):
            state = state.removesuffix("-literal")
            assert word is not None
            word += kept
        elif state == "quoted" and char not in b'"#':
            if char == b"\\":
                state = "quoted-literal"
            else:
                assert word is not None
                word += kept
        elif char == b"\n":
            if state == "spoilt":
                found, word, state = [], None, "between"
                continue
            del buffer[: at + 1]
            return [bytes(each).decode("ascii") for each in found]
        elif state in ("comment", "spoilt"):
            continue
        elif char == b'"' and state == "between":
            state, word = "quoted", bytearray()
            found.append(word)
        elif char == b"#":
            state = "spoilt" if state == "quoted" else "comment"
        elif char.isspace() or state == "quoted":
            state, word = "between", None
        else:
            if word is None:
                state, word = "bare", bytearray()
                found.append(word)
            if char == b"\\":
                state = "bare-literal"
            else:
                word += kept
    return None
