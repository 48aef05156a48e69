"""What staging keeps: each byte of memory once, sharing and strides too, and nothing that happens later."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def load_anew(flusher: Any, generation: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The values as a process that has none of them gets them."""
    return flusher.load(generation, dict.fromkeys(state)).values


def test_later_changes_don_t_leak_in(flusher, save):
    """What was staged is the state of that moment, though it is written later."""
    from powerguard.generations import generation_name, scan

    state = {"w": torch.arange(100.0), "n": {"epoch": [1]}}
    f = flusher()
    f.prepare(state, prove=False)
    staged = f.stage(state, 1)
    state["w"].zero_()
    state["n"]["epoch"].append(2)
    f.write(staged, generation_name(1, "a"))
    values = load_anew(f, scan(f.directory)[0], state)
    assert torch.equal(values["w"], torch.arange(100.0))
    assert values["n"] == {"epoch": [1]}


def test_two_staged_states_are_kept_and_the_third_replaces_the_oldest(flusher):
    """Two slots: the copy before the last can still be made durable, the one before that can't."""
    from powerguard.errors import StateError
    from powerguard.generations import generation_name, scan

    state = {"w": torch.zeros(10)}
    f = flusher()
    staged = []
    for step in (1, 2, 3):
        state["w"].fill_(step)
        staged.append(f.stage(state, step))
    assert [one.valid for one in staged] == [False, True, True]
    with pytest.raises(StateError, match="replaced by a newer"):
        f.write(staged[0], generation_name(1, "a"))
    for one in staged[1:]:
        f.write(one, generation_name(one.step, "a"))
    assert [load_anew(f, g, state)["w"][0].item() for g in scan(f.directory)] == [3.0, 2.0]


def test_a_slot_being_written_isn_t_reused(flusher):
    """While both slots are being written, a third copy waits instead of spoiling one."""
    from powerguard.generations import generation_name, scan

    state = {"w": torch.zeros(10)}
    f = flusher()
    go = threading.Event()
    entered = threading.Semaphore(0)

    def held() -> bool:
        entered.release()
        go.wait(20)
        return False

    writers = []
    for step in (1, 2):
        state["w"].fill_(step)
        staged = f.stage(state, step)
        name = generation_name(step, "a")
        writers.append(threading.Thread(target=f.write, args=(staged, name), kwargs={"cancelled": held}))
        writers[-1].start()
        entered.acquire()
    state["w"].fill_(3)
    third: list[Any] = []
    stager = threading.Thread(target=lambda: third.append(f.stage(state, 3)))
    stager.start()
    stager.join(0.2)
    assert stager.is_alive()
    go.set()
    for thread in (*writers, stager):
        thread.join(20)
    f.write(third[0], generation_name(3, "a"))
    assert [load_anew(f, g, state)["w"][0].item() for g in scan(f.directory)] == [3.0, 2.0, 1.0]


def test_tied_weights_are_kept_once_and_stay_tied(flusher, save):
    """Two names of one memory take its bytes once, and are one memory again."""
    weight = torch.randn(1000)
    f = flusher()
    state = {"a": {"w": weight, "also": weight}}
    generation = save(f, state, 1)
    values = load_anew(f, generation, state)["a"]
    assert torch.equal(values["w"], weight)
    assert values["w"].data_ptr() == values["also"].data_ptr()
    assert generation.bytes < 1.5 * 4000 + 20_000


def test_views_of_a_buffer_are_kept_once_and_stay_views(flusher, save):
    """A flat buffer and the parameters in it, overlapping and interleaved, come back as views of one buffer."""
    flat = torch.arange(10_000.0)
    parts = {"flat": flat, "head": flat[:100], "square": flat[100:500].view(20, 20).t(), "every": flat[::7]}
    f = flusher()
    generation = save(f, {"p": parts}, 1)
    values = load_anew(f, generation, {"p": None})["p"]
    for name, part in parts.items():
        assert torch.equal(values[name], part)
        assert values[name].stride() == part.stride()
    values["flat"].zero_()
    assert all(not part.any() for part in values.values())
    assert generation.bytes < 40_000 + 30_000


def test_interleaved_views_without_their_buffer(flusher, save):
    """Two slices that touch the same memory alternately, whose buffer isn't in the state."""
    flat = torch.arange(1000, dtype=torch.int16)
    parts = {"even": flat[0:900:2], "odd": flat[1:900:2]}
    f = flusher()
    values = load_anew(f, save(f, {"p": parts}, 1), {"p": None})["p"]
    assert all(torch.equal(values[name], part) for name, part in parts.items())


def test_a_slice_of_a_huge_tensor_takes_only_its_own_bytes(flusher, save):
    """Ten elements of a million take ten elements."""
    f = flusher()
    generation = save(f, {"t": torch.zeros(1_000_000)[5:15]}, 1)
    assert generation.bytes < 40_000


def test_an_expanded_tensor_takes_what_its_memory_takes(flusher, save):
    """A million times the same element is kept as one."""
    f = flusher()
    value = torch.tensor([3.0]).expand(1_000_000)
    generation = save(f, {"t": value}, 1)
    assert generation.bytes < 40_000
    assert torch.equal(load_anew(f, generation, {"t": None})["t"], value)


def test_channels_last_stays_channels_last(flusher, save):
    """Strides that are a permutation come back."""
    value = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    f = flusher()
    loaded = load_anew(f, save(f, {"t": value}, 1), {"t": None})["t"]
    assert torch.equal(loaded, value)
    assert loaded.stride() == value.stride()


def test_two_dtypes_over_one_memory(flusher, save):
    """A buffer and its bytes seen as another dtype."""
    value = torch.randn(100)
    state = {"t": [value, value.view(torch.int32), value.view(torch.uint8)[3:9]]}
    f = flusher()
    loaded = load_anew(f, save(f, state, 1), {"t": None})["t"]
    assert all(torch.equal(one, two) for one, two in zip(loaded, state["t"], strict=True))


def test_conjugated_and_negated_views(flusher, save):
    """Lazy conjugation and negation are carried out, not forgotten."""
    value = torch.randn(5, dtype=torch.complex64)
    state = {"t": [value.conj(), value.conj().imag]}
    f = flusher()
    generation = save(f, state, 1)
    loaded = load_anew(f, generation, {"t": None})["t"]
    assert torch.equal(loaded[0], value.conj().resolve_conj())
    assert torch.equal(loaded[1], -value.imag)
    for there in (torch.zeros(5, dtype=torch.complex64), torch.zeros(5, dtype=torch.complex64).conj()):
        f.load(generation, {"t": [there, torch.zeros(5)]})
        assert torch.equal(value.conj().resolve_conj(), there.resolve_conj())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_channel(torch.randn(2, 4), torch.ones(2), torch.zeros(2), 0, torch.quint4x2),
        lambda: torch.randn(3, 3).to_sparse(),
        lambda: torch.empty(3, device="meta"),
        torch.nn.UninitializedParameter,
    ],
    ids=["packed", "sparse", "meta", "uninitialized"],
)
def test_tensors_without_plain_bytes_are_refused_by_name(flusher, make):
    """What can't be kept exactly is refused when the state is prepared, naming the path."""
    from powerguard.errors import StateError

    with pytest.raises(StateError, match=r"model\.layer"):
        flusher().prepare({"model": {"layer": make()}}, prove=False)


def quantised() -> list[Any]:
    """One of each scheme and integer."""
    value = torch.randn(3, 4)
    scales, zeros = torch.tensor([0.1, 0.25, 0.3]), torch.tensor([0, 1, -2])
    return [
        torch.quantize_per_tensor(value, 0.1, 2, torch.qint8),
        torch.quantize_per_tensor(value, 1e-3, 128, torch.quint8).t(),
        torch.quantize_per_channel(value, scales, zeros, 0, torch.qint32),
        torch.quantize_per_channel(value, scales, zeros + 0.5, 0, torch.quint8),
        torch.quantize_per_tensor(torch.tensor(0.5), 0.1, 0, torch.qint8),
        torch.quantize_per_tensor(torch.empty(0, 3), 0.1, 0, torch.qint8),
    ]


def same_quantised(one: Any, other: Any) -> bool:
    """Integers, scheme, scales and zero points to the bit."""
    if (
        one.dtype != other.dtype
        or one.qscheme() != other.qscheme()
        or not torch.equal(one.int_repr(), other.int_repr())
    ):
        return False
    if one.qscheme() == torch.per_tensor_affine:
        return (one.q_scale(), one.q_zero_point()) == (other.q_scale(), other.q_zero_point())
    return (
        one.q_per_channel_axis() == other.q_per_channel_axis()
        and torch.equal(one.q_per_channel_scales(), other.q_per_channel_scales())
        and torch.equal(one.q_per_channel_zero_points(), other.q_per_channel_zero_points())
    )


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_tensors_come_back_with_their_scales(flusher, save):
    """Every scheme, made anew and over tensors that have other scales; who holds those sees the loaded ones."""
    state = {"q": quantised(), "tied": None}
    state["tied"] = [state["q"][0], state["q"][0]]
    f = flusher()
    generation = save(f, state, 1)
    assert all(map(same_quantised, load_anew(f, generation, state)["q"], state["q"]))
    there = {"q": [torch.quantize_per_tensor(torch.zeros(3, 4), 7.0, 5, torch.qint8)], "tied": None}
    there["q"] += quantised()[1:]
    held = there["q"][0]
    values = f.load(generation, there).values
    assert all(map(same_quantised, values["q"], state["q"]))
    assert values["q"][0] is held
    assert held.q_scale() == 0.1


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.slow
def test_a_quantised_model_comes_back_and_is_exported(flusher, save, tmp_path):
    """A torch.ao module answers alike after a load into a fresh one; torch gets its tensors, others their integers."""
    from safetensors.torch import load_file

    from powerguard.train.export import export

    torch.manual_seed(0)
    layer = torch.ao.nn.quantized.Linear(8, 3)
    layer.set_weight_bias(torch.quantize_per_tensor(torch.randn(3, 8), 0.02, 0, torch.qint8), torch.randn(3))
    layer.scale, layer.zero_point = 0.5, 3
    x = torch.quantize_per_tensor(torch.randn(2, 8), 0.1, 0, torch.quint8)
    f = flusher()
    generation = save(f, {"model": layer, "extra": quantised()}, 1)
    fresh = torch.ao.nn.quantized.Linear(8, 3)
    f.load(generation, {"model": fresh, "extra": None})
    assert same_quantised(fresh(x), layer(x))
    export(generation, tmp_path / "x.pt", "torch")
    exported = torch.load(tmp_path / "x.pt", weights_only=True)
    assert all(map(same_quantised, exported["extra"], quantised_like(f, generation)))
    export(generation, tmp_path / "x.safetensors", "safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["extra.0.values"], exported["extra"][0].int_repr())
    assert found["extra.0.scales"].tolist() == [0.1]
    export(generation, tmp_path / "x.dcp", "dcp")


def quantised_like(flusher: Any, generation: Any) -> list[Any]:
    layer = torch.ao.nn.quantized.Linear(8, 3)
    return flusher.load(generation, {"model": layer, "extra": None}).values["extra"]


def test_custom_objects_are_refused_unless_pickling_is_allowed(flusher, save):
    """No pickle by default, neither in saving nor in loading."""
    from decimal import Decimal

    from powerguard.errors import StateError

    state = {"a": {"price": Decimal("1.5")}}
    with pytest.raises(StateError, match=r"a\.price is a decimal\.Decimal.*allow_pickle"):
        flusher().stage(state, 1)
    trusting = flusher(allow_pickle=True)
    generation = save(trusting, state, 1)
    assert load_anew(trusting, generation, {"a": None})["a"] == state["a"]
    with pytest.raises(StateError, match="pickled"):
        flusher().load(generation, {"a": None})


def test_a_state_that_grows_is_staged_all_the_same(flusher, save):
    """A state that outgrew what was prepared costs a new arena, not an error."""
    f = flusher()
    f.prepare({"w": torch.zeros(10)}, prove=False)
    big = {"w": torch.arange(2_000_000.0)}
    assert torch.equal(load_anew(f, save(f, big, 1), big)["w"], big["w"])


def test_an_optimizer_without_state_is_foreseen(flusher):
    """Memory and space for AdamW's moments are made before its first step."""
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    f = flusher()
    before = f.prepare({"model": model, "optimizer": optimizer}, prove=False)
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    after = f.prepare({"model": model, "optimizer": optimizer}, prove=False)
    assert after.state_bytes <= before.capacity_bytes
    assert before.capacity_bytes == after.capacity_bytes


def test_preparing_measures_a_whole_save(flusher):
    """`prepare` writes the slot once and says how long it took."""
    ready = flusher().prepare({"w": torch.zeros(3_000_000)})
    assert ready.state_bytes > 12_000_000
    assert ready.write_s > 0
    assert ready.stage_s > 0
    assert ready.fsync_s >= 0
    assert ready.slots == 2
    assert ready.reserved == 2
    assert ready.warnings == ()


def test_no_search_for_garbage_holds_a_copy_up(flusher):
    """Taking thousands of tensors apart starts no collections, and leaves the collector as it was, errors or not."""
    import gc

    from powerguard.errors import StateError

    f = flusher()
    state = {"t": [torch.zeros(1) for _ in range(3000)]}
    f.stage(state, 1)
    starts: list[int] = []

    def watch(phase: str, info: dict[str, int]) -> None:
        starts.append(info["generation"])

    gc.collect()
    gc.callbacks.append(watch)
    try:
        gathered = f._take_apart(state)
        assert len(starts) < 5  # before and after it; every 700 objects otherwise, of which there are 20,000
    finally:
        gc.callbacks.remove(watch)
    assert gathered
    assert gc.isenabled()
    with pytest.raises(StateError):
        f.stage({"a": object()}, 2)
    assert gc.isenabled()


def test_our_name_in_a_state_is_refused(flusher):
    """The random states have a name of their own."""
    from powerguard.errors import StateError

    with pytest.raises(StateError, match="__rng__"):
        flusher().stage({"__rng__": 1}, 1)


def test_flush_is_stage_and_write_in_one(flusher):
    """The overlapped way ends in the same bytes, and the copy can be written again."""
    from powerguard.generations import generation_name, scan

    torch.manual_seed(1)
    state = {"w": [torch.randn(1_000_000) for _ in range(7)], "t": torch.randn(500, 700).t(), "e": torch.empty(0)}
    f = flusher()
    staged, _ = f.flush(state, 1, generation_name(1, "a"))
    f.write(staged, generation_name(1, "b"))
    for generation in scan(f.directory):
        values = load_anew(f, generation, state)
        assert all(torch.equal(one, two) for one, two in zip(values["w"], state["w"], strict=True))
        assert torch.equal(values["t"], state["t"])


def test_a_cancelled_save_leaves_nothing(flusher):
    """Given up in the middle: no generation, and the next save works."""
    from powerguard.generations import generation_name, scan
    from powerguard.train.flush import Cancelled

    state = {"w": torch.zeros(20_000_000)}
    f = flusher()
    f.prepare(state, prove=False)
    calls = iter(range(1000))
    with pytest.raises(Cancelled):
        f.flush(state, 1, generation_name(1, "a"), cancelled=lambda: next(calls) > 5)
    assert scan(f.directory) == []
    f.flush(state, 1, generation_name(1, "b"))
    assert [g.whole for g in scan(f.directory)] == [True]


def test_a_wrong_name_is_refused(flusher):
    """A generation's name must be of the staged step."""
    from powerguard.errors import StateError
    from powerguard.generations import generation_name

    f = flusher()
    staged = f.stage({"a": 1}, 1)
    for name in (generation_name(2, "a"), "gen-1", "../step-0000000001.a"):
        with pytest.raises(StateError):
            f.write(staged, name)


def test_writing_twice_is_refused(flusher):
    """A rank folder that is there is never overwritten."""
    from powerguard.errors import DirectoryError
    from powerguard.generations import generation_name

    f = flusher()
    staged = f.stage({"a": 1}, 1)
    f.write(staged, generation_name(1, "a"))
    with pytest.raises(DirectoryError, match="already written"):
        f.write(staged, generation_name(1, "a"))
