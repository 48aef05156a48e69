"""Records and seals prove themselves."""

from __future__ import annotations

import msgspec
import pytest

from powerguard.errors import CheckpointError
from powerguard.generations.names import RECORD, SEAL
from powerguard.generations.record import Record, RecordHead, Seal, decode


@pytest.mark.parametrize(("file", "kind"), [("rank-00000/" + RECORD, RecordHead), (SEAL, Seal)])
def test_every_flipped_byte_is_detected(make, file, kind):
    """No single wrong byte in a record or seal goes unnoticed."""
    data = (make(5) / file).read_bytes()
    decode(data, kind, "it")
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        with pytest.raises(CheckpointError):
            decode(bytes(bad), kind, "it")


@pytest.mark.parametrize(("file", "kind"), [("rank-00000/" + RECORD, RecordHead), (SEAL, Seal)])
def test_every_torn_length_is_detected(make, file, kind):
    """No prefix of a record or seal passes for the whole."""
    data = (make(5) / file).read_bytes()
    for size in range(len(data)):
        with pytest.raises(CheckpointError):
            decode(data[:size], kind, "it")


def test_a_record_is_plain_json(make):
    """Another program needs no more than a JSON parser."""
    data = (make(5) / "rank-00001" / RECORD).read_bytes()
    value = msgspec.json.decode(data)
    assert value["rank"] == 1
    assert value["state"] == {"step": 1}


def test_a_newer_format_is_named(make):
    """A record of another format says so instead of failing somewhere inside."""
    from powerguard.generations.record import encode

    record = decode((make(5) / "rank-00000" / RECORD).read_bytes(), Record, "it")
    data, _ = encode(msgspec.structs.replace(record, format="powerguard-record-9"))
    with pytest.raises(CheckpointError, match="powerguard-record-9"):
        decode(data, Record, "it")
