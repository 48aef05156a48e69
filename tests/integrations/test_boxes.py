"""Reading the newest generation without the objects that it was saved from."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from powerguard.errors import StateError  # noqa: E402
from powerguard.generations import generation_name, resumes  # noqa: E402
from powerguard.generations.seal import seal_if_whole  # noqa: E402
from powerguard.integrations.boxes import newest  # noqa: E402
from powerguard.train.flush import Flusher  # noqa: E402

pytestmark = pytest.mark.torch


def save(folder, world, step):
    """A generation of *world* ranks, each with a model of its own."""
    name = generation_name(step, "t-1")
    for rank in range(world):
        flusher = Flusher(folder, rank=rank, world_size=world, reserve=False, attempt="a")
        model = torch.nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.fill_(rank)
        optimizers = {"0": torch.optim.SGD(model.parameters(), lr=rank + 1.0)}
        flusher.flush({"model": model, "optimizers": optimizers}, step, name)
        flusher.close()
    assert seal_if_whole(folder, name).sealed


def read(folder):
    return newest(folder, objects=("model",), groups=("optimizers",))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_reads_its_own_before_anything_is_initialised(tmp_path, monkeypatch, rank):
    """As torchrun starts them: by the environment alone, and the newest."""
    save(tmp_path, 2, 4)
    save(tmp_path, 2, 9)
    for key, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(key, str(value))
    found = read(tmp_path)

    assert found.step == 9
    assert found.values["model"]["weight"].tolist() == [[float(rank)] * 2]
    assert found.values["optimizers"]["0"]["param_groups"][0]["lr"] == rank + 1.0
    assert resumes.read(tmp_path) == ({generation_name(9, "t-1"): 1} if rank == 0 else {}), "one of them counts"


def test_another_number_of_ranks_doesnt_silently_begin_anew(tmp_path):
    """It is said, with what to do; an empty directory is simply a beginning."""
    assert read(tmp_path / "empty") is None
    save(tmp_path, 2, 4)
    with pytest.raises(StateError, match=r"2 ranks.*(?s:torchrun)"):
        read(tmp_path)
