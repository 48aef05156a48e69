"""`powerguard checkpoints`: what is there, and whether it can be trusted."""

from __future__ import annotations

import json

from powerguard.cli import run
from powerguard.cli.calibrate import RANKS_MAX
from powerguard.generations.names import SHARD, rank_name


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    code = run(["checkpoints", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def spoil(folder) -> None:
    """One byte of rank 1's shard is another one."""
    path = folder / rank_name(1) / SHARD
    data = bytearray(path.read_bytes())
    data[1500] ^= 1
    path.write_bytes(data)


def test_list_shows_the_newest_first_and_what_is_wrong(make, tmp_path, capsys):
    """Sealed, unsealed and incomplete generations each have a line that says so."""
    make(10)
    make(20, sealed=False)
    make(30, ranks=range(1), sealed=False)
    code, out, err = call(capsys, "list", str(tmp_path))
    lines = out.splitlines()[1:]

    assert (code, err) == (0, "")
    assert [line.split()[0][:15] for line in lines] == ["step-0000000030", "step-0000000020", "step-0000000010"]
    assert "no seal" in lines[1]
    assert lines[2].rstrip().endswith("sealed")
    code, out, _ = call(capsys, "list", str(tmp_path), "--json")
    found = json.loads(out)
    assert [one["whole"] for one in found] == [False, True, True]
    assert found[0]["problems"]


def test_verify_stops_at_the_one_that_would_be_resumed_from(make, tmp_path, capsys):
    """The newest that verifies is enough; a flipped byte in a newer one is said and passed over."""
    make(10)
    make(20)
    spoil(make(30))
    code, out, err = call(capsys, "verify", str(tmp_path))

    assert (code, err) == (0, "")
    assert [line.split(":")[0].split()[0] for line in out.splitlines()] == ["bad", "good"]
    assert "step-0000000020" in out.splitlines()[1]


def test_verify_fails_where_nothing_can_be_trusted_or_the_chosen_one_cannot(make, tmp_path, capsys):
    """Exit code 12 and one line: for a chosen bad generation, for --all with one bad, and if all are bad."""
    good = make(10)
    bad = make(20)
    spoil(bad)
    code, _, err = call(capsys, "verify", str(tmp_path), "--generation", bad.name)
    assert (code, err.count("\n"), bad.name in err) == (12, 1, True)
    assert call(capsys, "verify", str(tmp_path), "--generation", good.name)[0] == 0
    code, out, _ = call(capsys, "verify", str(tmp_path), "--all")
    assert (code, len(out.splitlines())) == (12, 2)
    spoil(good)
    assert call(capsys, "verify", str(tmp_path))[0] == 12
    code, _, err = call(capsys, "verify", str(tmp_path), "--generation", "step-0000000099.x")
    assert (code, "holds no generation step-0000000099.x" in err) == (12, True)


def test_a_job_of_many_nodes_does_not_tell_calibrate_the_ranks_of_this_one(make, tmp_path, capsys):
    """Its newest generation holds more ranks than a node has: how many of them write here is asked, nothing starts."""
    make(1, world_size=RANKS_MAX + 1, size=10)
    code = run(["calibrate", str(tmp_path), "--state-bytes", "many"])

    assert code == 2
    assert (
        f"newest generation: {RANKS_MAX + 1} isn't a number from 1 to {RANKS_MAX}; give the ranks of this node"
        in capsys.readouterr().err
    )
