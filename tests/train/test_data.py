"""The data's position: what comes back exactly, and what is said where it doesn't. With the real torchdata."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata isn't installed (make setup)")

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

import powerguard  # noqa: E402
from powerguard.errors import StateError  # noqa: E402
from powerguard.train.data import examine  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")]  # by torchdata 0.11

DATA = TensorDataset(torch.arange(12.0))
EPOCHS = 3


class Run:
    """A loop over epochs whose loss depends on the data's order and on dropout."""

    def __init__(self, folder, loader):
        self.model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(1, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = loader
        self.place = {"epoch": 0, "step": 0}
        self.seen = []
        self.guard = powerguard.attach(
            {"model": self.model, "optimizer": self.optimizer, "loader": loader, "place": self.place},
            folder,
            socket=folder / "nobody.sock",
            reserve=False,
            prove=False,
        )
        self.first = self.guard.resume()

    def train(self, until):
        """Until so many steps are done."""
        while self.place["epoch"] < EPOCHS:
            if isinstance(self.loader.sampler, DistributedSampler):
                self.loader.sampler.set_epoch(self.place["epoch"])
            for (batch,) in self.loader:
                loss = self.model(batch[:, None]).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.seen.append((self.place["step"], batch.tolist(), loss.item()))
                self.place["step"] += 1
                self.guard.boundary(self.place["step"])
                if self.place["step"] == until:
                    self.guard.save(until, wait=True)
                    return
            self.place["epoch"] += 1


def make(kind):
    """A loader of *kind*, and everything seeded."""
    torch.manual_seed(7)
    sampler = {
        "shuffled": lambda: {"shuffle": True},
        "in order": dict,
        "distributed": lambda: {"sampler": DistributedSampler(DATA, 1, 0, seed=3)},
        "workers": lambda: {"shuffle": True, "num_workers": 1},
    }[kind]()
    return stateful.StatefulDataLoader(DATA, batch_size=2, **sampler)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [5, 6])
@pytest.mark.parametrize("kind", ["shuffled", "in order", "distributed"])
def test_a_stateful_loader_goes_on_at_the_next_batch(tmp_path, kind, cut):
    """Stopped in mid-epoch, at an epoch's end or after it: data, order and dropout are the uninterrupted run's."""
    whole = Run(tmp_path / "whole", make(kind))
    whole.train(18)
    whole.guard.close()
    before = Run(tmp_path / "cut", make(kind))
    before.train(cut)
    before.guard.close()
    loader = make(kind)
    torch.manual_seed(99)  # what a restart happens to begin with doesn't matter
    after = Run(tmp_path / "cut", loader)
    after.train(18)
    after.guard.close()

    assert whole.seen == before.seen + after.seen


@pytest.mark.slow
def test_workers_read_on_at_the_next_batch(tmp_path):
    """With a worker that has fetched ahead, what it fetched and nobody trained on comes again."""
    seen = []
    for until in (5, 12):
        run = Run(tmp_path, make("workers"))
        run.train(until)
        run.guard.close()
        seen += [number for _, batch, _ in run.seen for number in batch]

    assert sorted(seen[:12]) == DATA.tensors[0].tolist()
    assert sorted(seen[12:]) == DATA.tensors[0].tolist()


class Endless(IterableDataset):
    """Has no state."""

    def __iter__(self):
        return iter(range(100))


@pytest.mark.parametrize(
    ("loader", "word"),
    [
        (lambda: stateful.StatefulDataLoader(Endless()), "iterable"),
        (lambda: stateful.StatefulDataLoader(DATA, sampler=RandomSampler(DATA)), "RandomSampler"),
        (lambda: stateful.StatefulDataLoader(DATA, num_workers=2), "inside its workers"),
    ],
)
def test_what_comes_back_only_nearly_is_said(loader, word):
    """Each way of being not exact has a sentence of its own."""
    (text,) = examine({"data": loader()})

    assert text.startswith("data: ")
    assert word in text


@pytest.mark.parametrize("kind", ["shuffled", "in order", "distributed"])
def test_what_comes_back_exactly_needs_no_word(kind):
    """No warning for what is exact."""
    assert examine({"data": make(kind), "model": torch.nn.Linear(1, 1)}) == []


def test_a_loader_without_a_position_is_refused(tmp_path):
    """A plain DataLoader in the state: it is said what it lacks and what to take in its place."""
    with pytest.raises(StateError, match=r"(?s)loader .*can't tell its position.*StatefulDataLoader"):
        powerguard.attach({"loader": DataLoader(DATA)}, tmp_path)
