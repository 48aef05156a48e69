"""The plain library: periodic saves without a daemon."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from powerguard.errors import DirectoryError, StateError
from powerguard.generations import scan

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_save_and_load(tmp_path):
    """Two lines: saved, sealed, and back."""
    from powerguard import checkpoint

    state = {"w": torch.arange(5.0), "epoch": {"n": 3}}
    try:
        path = checkpoint.save(state, tmp_path, 7)
        assert path.parent == tmp_path
        assert [(7, True)] == [(g.step, g.sealed) for g in scan(tmp_path)]
        state["w"].zero_()
        state["epoch"]["n"] = 0
        report = checkpoint.load(state, tmp_path)
        assert report is not None
        assert report.step == 7
        assert torch.equal(state["w"], torch.arange(5.0))
        assert state["epoch"] == {"n": 3}
    finally:
        checkpoint.close()


def test_reading_is_no_resume(tmp_path):
    """However often a checkpoint is read, the newest is what everybody gets, who exports it too."""
    from powerguard import checkpoint
    from powerguard.generations import resumes

    try:
        for step in (1, 2):
            checkpoint.save({"a": step}, tmp_path, step)
        assert [2] * (resumes.CAP + 1) == [checkpoint.load({"a": 0}, tmp_path).step for _ in range(resumes.CAP + 1)]
        assert {} == resumes.read(tmp_path)
        assert 2 == checkpoint.find(tmp_path).step
    finally:
        checkpoint.close()


def test_what_others_saved_is_no_beginning(tmp_path):
    """Whole generations of another number of ranks: refused with what to do, and nothing of them is lost."""
    from powerguard import checkpoint

    for rank in (0, 1):
        with checkpoint.Checkpointer(tmp_path, rank=rank, world_size=2, attempt="a") as saver:
            saver.save({"a": rank}, 7)
    try:
        with pytest.raises(StateError, match=r"generations of 2 ranks.*one of 1(?s:.*)export"):
            checkpoint.load({"a": 0}, tmp_path)
    finally:
        checkpoint.close()


def test_nothing_to_load_is_none(tmp_path):
    """A first start finds nothing, and that is no error."""
    from powerguard import checkpoint

    try:
        assert checkpoint.load({"a": 1}, tmp_path / "new") is None
    finally:
        checkpoint.close()


def test_saving_in_the_background(tmp_path):
    """Each save holds its own step's values, however fast they follow each other; old ones are retired."""
    from powerguard.checkpoint import Checkpointer

    w = torch.zeros(300_000)
    with Checkpointer(tmp_path, keep=2) as saver:
        for step in range(1, 9):
            w.fill_(step)
            saver.save_async({"w": w}, step)
    assert [8, 7] == [g.step for g in scan(tmp_path)]
    with Checkpointer(tmp_path) as saver:
        w.zero_()
        saver.load({"w": w})
        assert w.eq(8).all()


def test_the_same_step_twice(tmp_path):
    """A second save at one step is a generation of its own, and the newer of the two."""
    from powerguard.checkpoint import Checkpointer

    with Checkpointer(tmp_path) as saver:
        assert saver.save({"a": 1}, 5) != saver.save({"a": 2}, 5)
        report = saver.load({"a": 0})
    assert report is not None
    assert report.values == {"a": 2}


def test_a_later_start_saves_beside_what_is_there(tmp_path):
    """After a restart from an older step, the same step is saved again without meeting the old one."""
    from powerguard.checkpoint import Checkpointer

    paths = []
    for _ in range(2):
        with Checkpointer(tmp_path) as saver:
            paths.append(saver.save({"a": 1}, 5))
    assert paths[0] != paths[1]
    assert all(path.is_dir() for path in paths)


def test_an_error_in_the_background_is_raised(tmp_path):
    """A save that failed is told at the next save, or at the end, not swallowed."""
    from powerguard.checkpoint import Checkpointer

    saver = Checkpointer(tmp_path / "d")
    saving = saver.save_async({"a": 1}, 1)
    saving.result()
    (tmp_path / "d" / saver._name(2)).write_text("a file in the way")
    saver._names.clear()
    saver.save_async({"a": 1}, 2)
    with pytest.raises(DirectoryError):
        saver.close()


def test_several_ranks_need_a_name_in_common(tmp_path, monkeypatch):
    """Started by hand without torch.distributed, ranks must be given an attempt: a guess could mix two runs."""
    from powerguard.checkpoint import Checkpointer

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(StateError, match="attempt="):
        Checkpointer(tmp_path, rank=0, world_size=2)
    savers = [Checkpointer(tmp_path, rank=rank, world_size=2, attempt="a1") for rank in range(2)]
    for rank, saver in enumerate(savers):
        saver.save({"rank": rank}, 1)
        assert [rank == 1] == [g.sealed for g in scan(tmp_path)]
        saver.close()


def test_every_rank_has_its_space_reserved_anew_after_a_save(tmp_path):
    """Beside the hook, which reserves: not only the rank that finishes last, which seals, has room for two more."""
    from powerguard.checkpoint import Checkpointer
    from powerguard.train.flush import Flusher

    flushers = [Flusher(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    for flusher in flushers:
        flusher.prepare({"w": torch.zeros(1000)}, prove=False)
    savers = [
        Checkpointer(tmp_path, rank=rank, world_size=2, attempt="a", keep=1, flusher=flusher)
        for rank, flusher in enumerate(flushers)
    ]
    for step in (1, 2, 3):
        for saver in savers:
            saver.save({"w": torch.ones(1000)}, step)
    waiting = [path.name.split(".")[0] for path in (tmp_path / ".powerguard" / "reserve").iterdir() if path.is_dir()]
    assert sorted(waiting) == ["rank-00000"] * 2 + ["rank-00001"] * 2
    for closing in (*savers, *flushers):
        closing.close()


@pytest.mark.parametrize("served", ["", "False", "True"])
def test_torchrun_s_id_is_no_name_for_the_start(tmp_path, monkeypatch, served):
    """A job that is requeued has the same: without the agent's store, or where it can't be reached, it's an error."""
    from powerguard.checkpoint import Checkpointer
    from powerguard.train import rendezvous

    with socket.socket() as deaf:  # bound, but nobody listens
        deaf.bind(("127.0.0.1", 0))
        env = {"RUN_ID": "4711", "RESTART_COUNT": "0", "USE_AGENT_STORE": served}
        for name, value in env.items():
            monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(deaf.getsockname()[1]))
        monkeypatch.setattr(rendezvous, "REACH_S", 0.2)
        with pytest.raises(StateError, match=r"no name in common(?s:.*)torchrun"):
            Checkpointer(tmp_path, rank=0, world_size=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_an_error(tmp_path, monkeypatch, rank):
    """Who waits for it is told which order is wanted."""
    from powerguard.checkpoint import Checkpointer
    from powerguard.train import rendezvous

    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setattr(rendezvous, "WAIT_S", 0.2)
    with pytest.raises(StateError, match=r"in vain(?s:.*)same order"):
        Checkpointer(tmp_path, rank=rank, world_size=2)


def test_what_an_earlier_start_has_asked_is_nobody_s_name():
    """Each of this start's ranks gets this start's name, whatever the store holds from before."""
    from powerguard.train.rendezvous import ask, tell

    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank in (1, 2):
        server.set(f"k/asks/{rank}", f"old{rank}")  # and died
    with ThreadPoolExecutor(3) as ranks:
        for name in ("one", "two"):
            clients = [torch.distributed.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(3)]
            told = ranks.submit(tell, clients[0], "k", 3, name)
            asked = [ranks.submit(ask, clients[rank], "k", rank, 3) for rank in (1, 2)]
            assert [name] * 2 == [future.result() for future in asked]
            told.result()


def run_main(*arguments: Any) -> int:
    from powerguard.checkpoint import main

    return main([str(argument) for argument in arguments])


def test_the_command_line(tmp_path, capsys):
    """Export and import from a shell; an operator's mistake is one line and an exit code."""
    from powerguard.checkpoint import Checkpointer

    with Checkpointer(tmp_path / "run") as saver:
        path = saver.save({"model": torch.nn.Linear(2, 2)}, 5)
    assert run_main("export", path, tmp_path / "dcp") == 0
    assert run_main("export", tmp_path / "run", tmp_path / "x.safetensors", "--to", "safetensors") == 0
    assert run_main("import", tmp_path / "dcp", tmp_path / "again", "--step", 5) == 0
    assert [5] == [g.step for g in scan(tmp_path / "again")]
    capsys.readouterr()
    assert run_main("export", path, tmp_path / "dcp") == 8
    assert run_main("export", tmp_path / "nothing", tmp_path / "out") == 12
    assert run_main("import", tmp_path, tmp_path / "out", "--step", 5) == 12
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert all(line.startswith("powerguard: ") for line in errors)
