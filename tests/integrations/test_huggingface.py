"""The Trainer's callback, with the real transformers and a tiny model with dropout."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers isn't installed (make setup)")
pytest.importorskip("accelerate", reason="accelerate isn't installed (make setup)")

from powerguard.errors import UsageError  # noqa: E402
from powerguard.generations import lives, scan  # noqa: E402
from powerguard.integrations.halted import Halted  # noqa: E402
from powerguard.integrations.huggingface import RESUMING, PowerguardCallback  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


class Model(torch.nn.Module):
    """Its result depends on the order of the data and on dropout."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def forward(self, x, labels=None):
        out = self.net(x)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


class Data(torch.utils.data.Dataset):
    """Augments with the global random numbers, as people do."""

    def __init__(self, random=False):
        self.x = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))
        self.random = random

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.x[i].sum(0, keepdim=True)}


class Watch(transformers.TrainerCallback):
    """Notes what each step made of the weights; begins the outage."""

    def __init__(self, model, outage):
        self.model, self.outage, self.seen = model, outage, {}
        self.evaluated = []
        self.ended = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.seen[state.global_step] = self.model.net[0].weight.detach().clone()
        self.outage.tick(state.global_step)

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluated.append(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        self.ended += 1


def train(tmp_path, outage, name, *, also=(), **options):
    """One life of a run in the folder *name*: what it saw, and how it ended."""
    transformers.set_seed(3)
    model = Model()
    watch = Watch(model, outage)
    guard = PowerguardCallback(tmp_path / name, **outage.options)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / f"{name}-out"), max_steps=10, per_device_train_batch_size=3,
        gradient_accumulation_steps=2, learning_rate=0.05, lr_scheduler_type="cosine", seed=3, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip
    data = Data()
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=data, eval_dataset=data, callbacks=[watch, guard, *also]
    )
    try:
        trainer.train(resume_from_checkpoint=guard.resume(trainer))
    except Halted as halted:
        return watch, halted
    finally:
        if guard.guard is not None:
            guard.guard.close()
    return watch, None


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("options", [{"eval_strategy": "steps", "eval_steps": 1}, {"eval_strategy": "epoch"}])
@pytest.mark.parametrize("at", [3, 4, 5])
def test_a_run_is_resumed_bit_by_bit(tmp_path, outage, at, options):
    """Stopped at an epoch's last step or in mid-epoch: what comes after equals the run that nobody stopped.

    It evaluates at every step, or at an epoch's end. That covers the traps of its loop: a boundary inside an
    accumulation, a scheduler one step behind, data that begins anew, an evaluation that draws random numbers, callbacks
    that run after the stop.
    """
    whole, _ = train(tmp_path, outage, "whole", **options)
    outage.at = at
    before, halted = train(tmp_path, outage, "cut", **options)
    outage.over()
    after, end = train(tmp_path, outage, "cut", **options)

    assert whole.evaluated
    assert halted is not None
    assert (halted.code, halted.step) == (75, max(before.seen))
    assert end is None
    assert min(after.seen) == halted.step + 1
    assert same(whole.seen, before.seen | after.seen)
    assert before.ended == 0, "what follows a training ran after the halt"
    assert [g.step for g in scan(tmp_path / "cut")] == [halted.step]
    assert list((tmp_path / "cut" / RESUMING).iterdir()) == []


class Short(transformers.TrainerCallback):
    """The device's memory is short once, before step *at* of the training."""

    def __init__(self, at):
        self.at = at

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            self.at = None
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("at", [0, 2])
def test_a_loop_that_begins_anew_is_guarded_again(tmp_path, outage, at):
    """`auto_find_batch_size` begins again after the device's memory was short, with smaller batches."""
    watch, end = train(tmp_path, outage, "anew", also=[Short(at)], auto_find_batch_size=True)

    assert end is None
    assert max(watch.seen) == 10
    assert watch.ended == 1
    assert lives.current(tmp_path / "anew").ended == "finished"


def test_a_resumed_loop_that_begins_anew_is_resumed_again(tmp_path, outage):
    """What it resumes from is still there, however late the memory was short."""
    outage.at = 4
    _, halted = train(tmp_path, outage, "cut", auto_find_batch_size=True)
    outage.over()
    watch, end = train(tmp_path, outage, "cut", also=[Short(halted.step + 1)], auto_find_batch_size=True)

    assert end is None
    assert sorted(watch.seen) == list(range(halted.step + 1, 11))
    assert list((tmp_path / "cut" / RESUMING).iterdir()) == []


def test_its_own_jit_checkpoint_is_refused(tmp_path, outage):
    """Two that stop a run don't go together."""
    with pytest.raises(UsageError, match="enable_jit_checkpoint"):
        train(tmp_path, outage, "jit", enable_jit_checkpoint=True)
