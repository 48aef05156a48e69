"""The deputy of a rank, a real process beside a real one, over the daemon's real bus."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from powerguard.core.messages import Exit, Failed, Held, Resume, SealWritten, Shard
from powerguard.generations import latest, verify
from powerguard.generations.names import SHARD
from tests.flusher.rig import Node, Rank, data_of, lives

pytestmark = pytest.mark.slow

WAIT_S = 60.0


def staged(node: Node, eventually, rank: int = 0, steps: tuple[int, ...] = (5, 10), **options: object) -> Rank:
    """A rank whose deputy says that it holds the last two of *steps*."""
    process = node.rank(rank, **{"world": 1, **options})
    process.stage(*steps)
    eventually(lambda: node.held(rank) == steps[-2:], WAIT_S)
    return process


def read(folder: Path, name: str, rank: int = 0) -> bytes:
    return (folder / "ckpt" / name / f"rank-{rank:05d}" / SHARD).read_bytes()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_the_last_state_of_a_dead_or_stopped_rank_becomes_durable(node, tmp_path, eventually, sign):
    """On the daemon's word the deputy writes the step that was decided, and the seal; every byte of it is right."""
    process = staged(node, eventually)
    os.kill(process.child.pid, sign)
    name = node.decide(0, 7, 5)
    eventually(lambda: node.said(Shard), WAIT_S)
    node.seal(0, 7, 5, name, 1)
    eventually(lambda: node.said(SealWritten), WAIT_S)
    found = latest(tmp_path / "ckpt")

    assert found.generation is not None
    assert (name, True, True) == (found.generation.name, found.generation.sealed, found.generation.whole)
    assert [] == verify(found.generation)
    assert data_of(5, 0) == read(tmp_path, name)


def test_both_ranks_step_in_common_becomes_one_sealed_generation(node, tmp_path, eventually):
    """One rank killed, one stopped, at different newest steps: the newest that both hold is written and verifies."""
    ahead = staged(node, eventually, 0, (5, 10), world=2)
    behind = staged(node, eventually, 1, (5, 10), world=2)
    ahead.stage(15)
    eventually(lambda: node.held(0) == (10, 15), WAIT_S)
    os.kill(ahead.child.pid, signal.SIGSTOP)
    os.kill(behind.child.pid, signal.SIGKILL)
    common = max(set(node.held(0)) & set(node.held(1)))
    name = node.decide(0, 9, common)
    node.decide(1, 9, common)
    eventually(lambda: node.said(Shard, 0) and node.said(Shard, 1), WAIT_S)
    node.seal(1, 9, common, name, 2)
    eventually(lambda: node.said(SealWritten, 1), WAIT_S)
    found = latest(tmp_path / "ckpt")

    assert 10 == common
    assert found.generation is not None
    assert [] == verify(found.generation)
    assert [data_of(10, rank) for rank in (0, 1)] == [read(tmp_path, name, rank) for rank in (0, 1)]


def test_a_rank_killed_while_it_stages_leaves_the_state_before(node, tmp_path, eventually):
    """The torn copy is never offered; the one before it is written."""
    process = staged(node, eventually, torn_at=15)
    process.stage(15)
    eventually(lambda: "torn 15" in process.log.read_text())
    os.kill(process.child.pid, signal.SIGKILL)
    eventually(lambda: node.held() == (10,), WAIT_S)
    name = node.decide(0, 7, 10)
    eventually(lambda: node.said(Shard), WAIT_S)

    assert data_of(10, 0) == read(tmp_path, name)


def test_a_step_that_is_not_staged_is_refused_in_words(node, tmp_path, eventually):
    """FAILED names what there is; no file of it remains, and staging goes on."""
    process = staged(node, eventually)
    name = node.decide(0, 7, 6)
    eventually(lambda: node.said(Failed), WAIT_S)
    (said,) = {message.why for message in node.said(Failed)}

    assert "step 6 isn't staged (staged: 5, 10)" in said
    assert not (tmp_path / "ckpt" / name).exists()
    process.stage(15)
    eventually(lambda: node.held() == (10, 15), WAIT_S)


def test_the_decided_step_is_kept_until_the_order_is_over(node, eventually):
    """A rank that trains on doesn't overwrite it; after RESUME it stages again."""
    process = staged(node, eventually)
    node.decide(0, 7, 5)
    eventually(lambda: node.said(Shard), WAIT_S)
    process.stage(15)
    eventually(lambda: "kept 15" in process.log.read_text(), WAIT_S)
    node.tell(0, Resume(7, "mains back"))
    eventually(lambda: _stages(process, 20), WAIT_S)


def _stages(process: Rank, step: int) -> bool:
    process.stage(step)
    return f"staged {step}" in process.log.read_text()


def test_a_repeated_decision_is_answered_from_memory(node, eventually):
    """An order heard again is answered again, and written once."""
    staged(node, eventually)
    name = node.decide(0, 7, 5)
    eventually(lambda: node.said(Shard), WAIT_S)
    before = len(node.said(Shard))
    eventually(lambda: node.decide(0, 7, 5) == name and len(node.said(Shard)) > before, WAIT_S)

    assert 1 == len(set(node.said(Shard)))


def test_a_deputy_started_anew_finds_what_the_first_one_wrote(node, tmp_path, eventually):
    """Killed between the rename and the word, its successor says the same SHARD instead of failing."""
    process = staged(node, eventually)
    node.decide(0, 7, 5)
    eventually(lambda: node.said(Shard), WAIT_S)
    first = node.said(Shard)[0]
    old = process.deputy
    os.kill(old, signal.SIGKILL)
    eventually(lambda: not lives(old))
    assert process.ledger is not None
    start(process.ledger)
    eventually(lambda: process.deputy not in (0, old), WAIT_S)
    before = len(node.said(Shard))
    eventually(lambda: node.decide(0, 7, 5) and len(node.said(Shard)) > before, WAIT_S)

    assert first.record == node.said(Shard)[-1].record


def start(ledger: Path) -> None:
    subprocess.run([sys.executable, "-m", "powerguard.flusher", str(ledger)], start_new_session=True, check=True)


def test_the_kill_of_a_ranks_group_and_family_spares_the_deputy(node, eventually):
    """It is in a session of its own and no descendant of the rank, so launchers that end those don't reach it."""
    process = staged(node, eventually)
    deputy = process.deputy
    parents = {int(line.split()[3]) for line in _stats()}

    assert os.getsid(deputy) != os.getsid(process.child.pid)
    assert os.getpgid(deputy) != os.getpgid(process.child.pid)
    assert process.child.pid not in parents
    for sign in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(deputy, sign)
    os.killpg(process.child.pid, signal.SIGKILL)
    node.decide(0, 7, 10)
    eventually(lambda: node.said(Shard), WAIT_S)


def _stats() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.append(text.partition("(")[0] + "x " + text.rpartition(")")[2])
    return found


def test_it_leaves_with_a_rank_that_has_finished(node, tmp_path, eventually):
    """A closed shelf ends it, with every file in shared memory."""
    process = staged(node, eventually)
    deputy = process.deputy
    process.child.stdin.close()
    process.child.wait(30)
    eventually(lambda: not lives(deputy), WAIT_S)

    assert [] == list((tmp_path / "shm").iterdir())
    assert [] == [p for p in (tmp_path / "ckpt").rglob("*") if p.is_dir() and ".90." in p.name]


@pytest.mark.parametrize("how", ["exit", "linger", "term"])
def test_it_outlives_a_dead_rank_only_as_long_as_it_is_needed(node, tmp_path, eventually, how):
    """EXIT, SIGTERM or its time end it once the rank is dead, and the shared memory is given back."""
    process = staged(node, eventually, linger_s=1.0 if how == "linger" else 900.0)
    deputy = process.deputy
    if how == "term":
        os.kill(deputy, signal.SIGTERM)
    else:
        assert lives(deputy)
    os.kill(process.child.pid, signal.SIGKILL)
    process.child.wait(30)
    if how == "exit":
        node.tell(0, Exit(7, 75, "halting"))
    eventually(lambda: not lives(deputy), WAIT_S)

    assert [] == list((tmp_path / "shm").iterdir())


def test_it_gives_way_to_a_new_process_of_its_rank(node, eventually):
    """A restarted rank stages anew under a deputy of its own; the old one leaves, its memory too."""
    first = staged(node, eventually)
    old = first.deputy
    os.kill(first.child.pid, signal.SIGKILL)
    first.child.wait(30)
    second = node.rank(0, 1)
    second.stage(20, 25)
    eventually(lambda: not lives(old), WAIT_S)
    eventually(lambda: node.held() == (20, 25), WAIT_S)
    files = [path.name for path in (node.folder / "shm").iterdir()]

    assert all(f".{second.child.pid}." in name for name in files)


def test_a_restarted_daemon_hears_what_is_held(node, eventually):
    """The deputy speaks without being asked, so a daemon that knows nothing learns it within a second or two."""
    staged(node, eventually)
    node.bus.close(0.0)
    from powerguard.node.bus import Bus

    node.reports.clear()
    node.bus = Bus(node.path, put=node.reports.append, clock=lambda: 0.0)
    eventually(lambda: node.said(Held) and node.held() == (5, 10), WAIT_S)


def test_the_deputy_has_neither_torch_nor_numpy(node, eventually):
    """Not one of their libraries is mapped into the process, and it takes little memory."""
    process = staged(node, eventually)
    maps = Path(f"/proc/{process.deputy}/maps").read_text()
    status = Path(f"/proc/{process.deputy}/status").read_text()
    rss_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))

    assert "torch" not in maps
    assert "numpy" not in maps
    assert rss_kb < 60_000
