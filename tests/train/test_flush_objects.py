"""Modules, optimizers, schedulers and generators come back in the objects that are there."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Tied(torch.nn.Module):
    """Tied weights, buffers, extra state and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.extra = {"calls": 0}

    def forward(self, x: Any) -> Any:
        self.extra["calls"] += 1
        return self.head(self.norm(self.embed(x)))

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.extra)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = dict(state)


def train(model: Any, optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(torch.randint(10, (32,))), torch.randint(10, (32,)))
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1),
    "adafactor": torch.optim.Adafactor,
}
SCHEDULERS = {
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5, 5, 7]),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=100),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 10)],
        milestones=[4],
    ),
}


def build(optimizer: str, scheduler: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Tied()
    opt = OPTIMIZERS[optimizer](model.parameters())
    return {"model": model, "optimizer": opt, "scheduler": SCHEDULERS[scheduler](opt)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on_bit_exactly(flusher, save, optimizer):
    """In fresh objects and in used ones, training continues as if nothing had happened."""
    for scheduler in SCHEDULERS if optimizer == "adamw" else ["multistep"]:
        f = flusher()
        state = build(optimizer, scheduler, 1)
        train(*state.values(), steps=3)
        generation = save(f, state, 3, tag=scheduler)
        expected = train(*state.values(), steps=4)
        calls = state["model"].extra["calls"]
        assert f.load(generation, state).left == ()
        assert train(*state.values(), steps=4) == expected
        fresh = build(optimizer, scheduler, 2)
        f.load(generation, fresh)
        assert train(*fresh.values(), steps=4) == expected
        assert fresh["model"].extra["calls"] == calls


def test_the_same_tensors_are_filled(flusher, save):
    """No parameter, buffer or moment is replaced by another tensor, if it is there already."""
    state = build("adamw", "multistep", 1)
    train(*state.values(), steps=1)
    f = flusher()
    generation = save(f, state, 1)
    tensors = [*state["model"].state_dict().values(), *state["optimizer"].state_dict()["state"][0].values()]
    before = [t.data_ptr() for t in tensors if isinstance(t, torch.Tensor)]
    f.load(generation, state)
    tensors = [*state["model"].state_dict().values(), *state["optimizer"].state_dict()["state"][0].values()]
    assert before == [t.data_ptr() for t in tensors if isinstance(t, torch.Tensor)]


def test_moments_keep_their_dtype(flusher, save):
    """fp32 moments of bf16 parameters stay fp32: torch's own load_state_dict would round them."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight])
    moment = torch.tensor([1 + 2**-20] * 4)
    optimizer.state[weight] = {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment.clone()}
    f = flusher()
    generation = save(f, {"o": optimizer}, 1)
    fresh = torch.optim.AdamW([weight])
    f.load(generation, {"o": fresh})
    assert fresh.state[weight]["exp_avg"].dtype == torch.float32
    assert torch.equal(fresh.state[weight]["exp_avg"], moment)


def test_a_model_that_differs_is_refused_before_it_is_touched(flusher, save):
    """Another layer, another shape or another dtype: an error that names it, and not one value changed."""
    from powerguard.errors import StateError

    f = flusher()
    generation = save(f, {"m": torch.nn.Linear(3, 3)}, 1)
    for model, words in (
        (torch.nn.Linear(3, 3, bias=False), "the checkpoint has bias"),
        (torch.nn.Linear(4, 3), r"m\.weight is torch\.float32 \[3, 4\] here"),
        (torch.nn.Linear(3, 3).double(), r"torch\.float64"),
    ):
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(StateError, match=words):
            f.load(generation, {"m": model})
        assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


class Grown(torch.nn.Module):
    """Its scale has one element until it has seen a batch, as an observer's; extra state grows with what happened."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.seen = torch.zeros(0, dtype=torch.uint8)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if self.scale.dtype == state[f"{prefix}scale"].dtype:
            self.scale = torch.empty_like(state[f"{prefix}scale"])
        super()._load_from_state_dict(state, prefix, *rest)


def test_tensors_that_a_module_brings_to_size_itself(flusher, save):
    """Another shape is fine where the owner takes it, else it refuses; plain layers beside it stay strict."""
    from powerguard.errors import StateError

    def build(width: int = 3) -> Any:
        return torch.nn.ModuleDict({"linear": torch.nn.Linear(width, 3), "grown": Grown()})

    old, f = build(), flusher()
    old["grown"].scale, old["grown"].seen = torch.arange(3.0), torch.arange(7, dtype=torch.uint8)
    generation = save(f, {"m": old}, 1)
    new = build()
    f.load(generation, {"m": new})

    assert torch.equal(old["grown"].scale, new["grown"].scale)
    assert torch.equal(old["grown"].seen, new["grown"].seen)
    assert torch.equal(old["linear"].weight, new["linear"].weight)
    with pytest.raises(StateError, match=r"m\.linear\.weight is torch\.float32 \[3, 4\] here"):
        f.load(generation, {"m": build(4)})
    odd = build()
    odd["grown"].scale = odd["grown"].scale.double()
    with pytest.raises(StateError, match="refuses its state"):
        f.load(generation, {"m": odd})


def test_layers_of_torch_keep_their_shapes(flusher, save):
    """A batch norm loads in a way of its own, and is refused before anything is touched all the same."""
    from powerguard.errors import StateError

    f = flusher()
    generation = save(f, {"m": torch.nn.BatchNorm1d(3)}, 1)
    with pytest.raises(StateError, match=r"m\.weight is torch\.float32 \[4\] here"):
        f.load(generation, {"m": torch.nn.BatchNorm1d(4)})


def test_sources_must_be_the_same(flusher, save):
    """A source that is missing on either side is an error, or is told with strict=False."""
    from powerguard.errors import StateError

    f = flusher()
    generation = save(f, {"a": 1, "b": 2}, 1)
    with pytest.raises(StateError, match=r"no \['c'\].*no \['b'\]"):
        f.load(generation, {"a": 0, "c": 0})
    report = f.load(generation, {"a": 0, "c": 0}, strict=False)
    assert report.values == {"a": 1}
    assert report.left == ("'c' isn't in the checkpoint", "'b' is only in the checkpoint")


def test_containers_are_updated_in_place(flusher, save):
    """Whoever holds the dict that was given sees the loaded values."""
    f = flusher()
    generation = save(f, {"meta": {"epoch": 3, "inner": {"a": [1, 2]}, "gone": 1}, "list": [1, {"x": 1}]}, 1)
    inner: dict[str, Any] = {"a": [], "extra": 1}
    meta = {"epoch": 0, "inner": inner, "new": 1}
    there = {"meta": meta, "list": [None]}
    f.load(generation, there)
    assert meta == {"epoch": 3, "inner": {"a": [1, 2]}, "gone": 1}
    assert meta["inner"] is inner
    assert there["list"] == [1, {"x": 1}]


def test_objects_inside_containers(flusher, save):
    """A list of optimizers in a dict works like one at the top."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], lr=0.1 * (i + 1)) for i, w in enumerate(weights)]
    f = flusher()
    generation = save(f, {"all": {"optimizers": optimizers}}, 1)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.0
    f.load(generation, {"all": {"optimizers": optimizers}})
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.1, 0.2]


def test_an_object_for_a_value_is_refused(flusher, save):
    """What was an object can't be loaded into a number."""
    from powerguard.errors import StateError

    f = flusher()
    generation = save(f, {"m": torch.nn.Linear(2, 2)}, 1)
    with pytest.raises(StateError, match="m was saved from a torch"):
        f.load(generation, {"m": 3})


def test_an_object_that_refuses_its_state_is_one_clear_error(flusher, save):
    """An exception inside load_state_dict names the source."""
    from powerguard.errors import StateError

    class Picky:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            state["b"]

    f = flusher()
    generation = save(f, {"p": Picky()}, 1)
    with pytest.raises(StateError, match=r"p .*Picky.* refuses its state"):
        f.load(generation, {"p": Picky()})


def test_random_states_come_back(flusher, save):
    """Python's, numpy's and torch's global generators, and those in the state, draw the same numbers again."""
    np = pytest.importorskip("numpy")
    assert "numpy" in sys.modules
    mine = {
        "torch": torch.Generator().manual_seed(5),
        "python": random.Random(5),
        "numpy": np.random.default_rng(5),
        "old numpy": np.random.RandomState(5),
    }

    def draw(own: dict[str, Any]) -> list[Any]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.rand(3).tolist(),
            torch.rand(3, generator=own["torch"]).tolist(),
            own["python"].random(),
            own["numpy"].random(),
            own["old numpy"].rand(),
        ]

    draw(mine)
    f = flusher()
    generation = save(f, {"mine": mine}, 1)
    expected = draw(mine)
    f.load(generation, {"mine": mine})
    assert draw(mine) == expected
    values = f.load(generation, {"mine": None}).values
    assert draw(values["mine"]) == expected


def test_numpy_values_come_back(flusher, save):
    """Arrays of any dtype and numpy scalars, exactly."""
    np = pytest.importorskip("numpy")
    value = {
        "a": np.arange(6, dtype=">i4").reshape(2, 3),
        "f": np.asfortranarray(np.random.rand(3, 4)),
        "d": np.array(["2024-01-01"], dtype="datetime64[D]"),
        "s": np.float32(0.1),
        "e": np.empty((0, 3)),
        "z": np.array(7),
        "u": np.array(["é"]),
    }
    f = flusher()
    loaded = f.load(save(f, {"v": value}, 1), {"v": None}).values["v"]
    for key, one in value.items():
        assert type(loaded[key]) is type(one)
        assert loaded[key].dtype == one.dtype
        assert np.array_equal(loaded[key], one)


def test_large_bytes_survive(flusher, save):
    """A megabyte of bytes in a state is saved as it is."""
    f = flusher()
    value = random.Random(1).randbytes(1 << 20)
    assert f.load(save(f, {"v": value}, 1), {"v": None}).values["v"] == value


def test_compiled_and_wrapped_names_are_plain_modules(flusher, save):
    """Whatever state_dict says is what is saved: no name is changed."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    f = flusher()
    generation = save(f, {"m": model}, 1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    f.load(generation, {"m": model})
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
