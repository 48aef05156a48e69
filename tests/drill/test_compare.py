"""The comparison that says whether an interrupted run is the same run."""

import json

import pytest

from powerguard.drill.compare import compare, read

STEPS = 7  # 0 to 6
END = 6


def loss(rank, step):
    return float(1.0 / (1 + step + rank)).hex()


def write(folder, rank, *lives, end=True, wrong=(), parameters="abc"):
    """One rank's file: each life is (first step, last step); *wrong* steps get a loss that differs in the last bit."""
    folder.mkdir(exist_ok=True)
    lines = []
    for n, (start, last) in enumerate(lives):
        who = {"rank": rank, "pid": 100 + n, "at": 10.0 * n}
        lines.append({**who, "event": "start", "step": start})
        for step in range(start, last + 1):
            value = loss(rank, step) if step not in wrong else loss(rank, step).replace("p", "1p")
            lines.append({**who, "event": "step", "step": step, "loss": value})
        if end and n == len(lives) - 1:
            lines.append({**who, "event": "end", "step": last, "parameters": parameters})
    (folder / f"rank-{rank:05}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def reference(tmp_path):
    for rank in (0, 1):
        write(tmp_path / "reference", rank, (0, END))
    return read(tmp_path / "reference")


def drilled(tmp_path, *lives, **odd):
    write(tmp_path / "node", 0, *lives)
    write(tmp_path / "node", 1, *odd.pop("lives", lives), **odd)
    return read(tmp_path / "node")


def test_a_run_resumed_where_it_stopped_is_exact(tmp_path, reference):
    """Stopped after step 3, resumed from 3, equal losses and parameters: bit-exact, nothing lost."""
    got = compare(reference, drilled(tmp_path, (0, 3), (4, END)), ranks=2, steps=STEPS)
    assert (got.reached, got.resumed_step, got.lost_steps, got.bit_exact) == (3, 3, 0, True)
    assert got.losses_compared == 2 * STEPS


def test_steps_that_are_trained_again_are_lost_but_may_be_exact(tmp_path, reference):
    """Four steps done, resumed from 1: three lost, and still the same run."""
    got = compare(reference, drilled(tmp_path, (0, 4), (2, END)), ranks=2, steps=STEPS)
    assert (got.resumed_step, got.lost_steps, got.bit_exact) == (1, 3, True)


def test_a_run_that_was_never_interrupted_did_not_resume(tmp_path, reference):
    """One life that ends: no resumed step."""
    got = compare(reference, drilled(tmp_path, (0, END)), ranks=2, steps=STEPS)
    assert (got.resumed_step, got.lost_steps, got.bit_exact) == (None, 0, True)


@pytest.mark.parametrize(
    ("lives", "odd", "words"),
    [
        (((0, 3), (4, END)), {"wrong": (2,)}, "rank 1, step 2"),
        (((0, 3), (4, END)), {"wrong": (5,)}, "rank 1, step 5"),
        (((0, 3), (4, END)), {"parameters": "abd"}, "other parameters"),
        (((0, 3), (5, END)), {}, "never completed step 4"),
        (((0, 3), (4, 5)), {"end": False}, "never completed step 6"),
        (((0, 3),), {"end": False}, "never completed step 4"),
        (((0, 3), (4, END)), {"lives": ((0, 3), (3, END))}, "different steps"),
    ],
)
def test_any_difference_is_found_and_named(tmp_path, reference, lives, odd, words):
    """One wrong bit, a gap, a missing end, ranks that resumed apart: never bit-exact, and the words say why."""
    got = compare(reference, drilled(tmp_path, *lives, **odd), ranks=2, steps=STEPS)
    assert not got.bit_exact
    assert words in got.difference


def test_a_reference_that_did_not_finish_proves_nothing(tmp_path):
    """Without a whole reference run no run is called exact."""
    for rank in (0, 1):
        write(tmp_path / "reference", rank, (0, 4), end=False)
    got = compare(read(tmp_path / "reference"), drilled(tmp_path, (0, 3), (4, END)), ranks=2, steps=STEPS)
    assert not got.bit_exact
    assert "reference" in got.difference


def test_a_rank_that_wrote_nothing_is_not_exact(tmp_path, reference):
    """A missing rank is a difference, and nothing was reached."""
    write(tmp_path / "node", 0, (0, 3), (4, END))
    got = compare(reference, read(tmp_path / "node"), ranks=2, steps=STEPS)
    assert not got.bit_exact
    assert "rank 1" in got.difference


def test_a_line_torn_by_the_cut_is_left_out(tmp_path, reference):
    """The last line may end anywhere; what is before it counts."""
    node = tmp_path / "node"
    write(node, 0, (0, 3), end=False)
    path = node / "rank-00000.jsonl"
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert read(node)[0][0].last == 2
