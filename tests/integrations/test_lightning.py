"""Lightning's callback, with the real lightning and a tiny model with dropout."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning.pytorch", reason="lightning isn't installed (make setup)")
stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata isn't installed (make setup)")

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper  # noqa: E402
from lightning.pytorch import callbacks  # noqa: E402
from lightning.pytorch.plugins.environments import SLURMEnvironment  # noqa: E402

from powerguard.errors import UsageError  # noqa: E402
from powerguard.generations import scan  # noqa: E402
from powerguard.integrations.halted import Halted  # noqa: E402
from powerguard.integrations.lightning import RESUMING, PowerguardCallback  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))


class Data(torch.utils.data.Dataset):
    """Augments with the global random numbers, as people do."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return X[i] + 0.1 * torch.randn(4)


DATA = Data()


class Module(lightning.LightningModule):
    """Its result depends on the order of the data, on dropout and on its hooks; two micro-batches are one step."""

    def __init__(self, outage):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.outage, self.seen, self.validated = outage, {}, 0
        if outage.options.get("allow_pickle"):
            self.save_hyperparameters({"root": Path("/data")})

    def training_step(self, batch, index):
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch, index):
        self.validated += 1

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        each_step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        each_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return [optimizer], [{"scheduler": each_step, "interval": "step"}, {"scheduler": each_epoch}]

    def on_train_epoch_start(self):
        torch.rand(1)

    def on_train_epoch_end(self):
        torch.rand(1)

    def on_train_batch_end(self, outputs, batch, index):
        """Called after the callbacks: notes what the step made of the weights."""
        self.seen[self.trainer.global_step] = self.net[0].weight.detach().clone()


class Trigger(lightning.Callback):
    """Begins the outage, before powerguard's callback."""

    ended, validated = False, 0

    def on_train_batch_end(self, trainer, module, *args):
        self.validated = module.validated  # when the last step was complete
        module.outage.tick(trainer.global_step)

    def on_train_end(self, trainer, module):
        self.ended = True


def fit(tmp_path, outage, name, *, loader=None, validate=False, before=(), after=(), **options):
    """One life of a run in the folder *name*."""
    lightning.seed_everything(3, verbose=False)
    loader = loader() if callable(loader) else loader
    module, trigger = Module(outage), Trigger()
    guard = PowerguardCallback(tmp_path / name, **outage.options)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[trigger, *before, guard, *after],
        num_sanity_val_steps=0, val_check_interval=2, default_root_dir=tmp_path, **options,
    )  # fmt: skip
    loader = loader or stateful.StatefulDataLoader(DATA, batch_size=3, shuffle=True)
    check = torch.utils.data.DataLoader(DATA, batch_size=12) if validate else None
    try:
        trainer.fit(module, loader, check, ckpt_path=guard.resume(), weights_only=False)
    except Halted as halted:
        return module, trigger, halted
    finally:
        if guard.guard is not None:
            guard.guard.close()
    return module, trigger, None


def by_epoch():
    """A loader whose order goes by epoch, as Lightning makes them for several ranks."""
    sampler = torch.utils.data.DistributedSampler(DATA, num_replicas=1, rank=0, seed=7)
    return stateful.StatefulDataLoader(DATA, batch_size=3, sampler=sampler)


def wrapped():
    """What Lightning makes of a shuffling loader for several ranks: its own sampler around torchdata's."""
    inside = stateful.sampler.RandomSampler(DATA)
    return stateful.StatefulDataLoader(DATA, batch_size=3, sampler=DistributedSamplerWrapper(inside, 1, 0))


@pytest.mark.parametrize(
    ("at", "validate", "loader"),
    [
        (5, False, None), (5, True, None), (4, False, None), (4, True, None), (8, True, None),
        (5, False, by_epoch), (8, True, by_epoch), (2, False, wrapped), (5, False, wrapped), (8, True, wrapped),
    ],
)  # fmt: skip
def test_a_run_is_resumed_bit_by_bit(tmp_path, outage, at, validate, loader):
    """Stopped in mid-epoch, or at its end: what comes after equals the run that nobody stopped.

    That covers the traps of its loop: the hook that fires for micro-batches, a stop that validates first and is ignored
    before min_epochs, random numbers that it doesn't keep.
    """
    whole, _, _ = fit(tmp_path, outage, "whole", validate=validate, loader=loader)
    outage.at = at
    before, trigger, halted = fit(tmp_path, outage, "cut", validate=validate, loader=loader)
    outage.over()
    after, _, end = fit(tmp_path, outage, "cut", validate=validate, loader=loader)

    assert halted is not None
    assert halted.code == 75
    assert end is None
    assert not trigger.ended, "what follows a training ran after the halt"
    if halted.step % 4:  # at an epoch's end, its validation is part of it
        assert before.validated == trigger.validated, "the stop validated first"
    assert [g.step for g in scan(tmp_path / "cut")] == [halted.step]
    assert max(after.seen) == 12
    later = {step: weight for step, weight in whole.seen.items() if step > halted.step}
    assert {step: bool(torch.equal(weight, after.seen[step])) for step, weight in later.items()} == dict.fromkeys(
        later, True
    )
    assert list((tmp_path / "cut" / RESUMING).iterdir()) == []


@pytest.mark.parametrize("at", [5, 8])
def test_an_average_of_the_weights_is_resumed_bit_by_bit(tmp_path, outage, at):
    """Lightning puts the average where the weights were; the training goes on with the weights, and ends with it."""

    def averaging():
        return {"before": [callbacks.EMAWeightAveraging(decay=0.9)]}

    whole, _, _ = fit(tmp_path, outage, "whole", validate=True, **averaging())
    outage.at = at
    _, _, halted = fit(tmp_path, outage, "cut", validate=True, **averaging())
    outage.over()
    after, _, end = fit(tmp_path, outage, "cut", validate=True, **averaging())

    assert halted is not None
    assert end is None
    assert [step for step in after.seen if not torch.equal(after.seen[step], whole.seen[step])] == []
    assert not torch.equal(whole.net[0].weight, whole.seen[12])
    assert torch.equal(after.net[0].weight, whole.net[0].weight)


def test_an_average_that_comes_after_the_boundary_is_refused(tmp_path, outage):
    """It would be saved without the step that the weights are of."""
    with pytest.raises(UsageError, match="PowerguardCallback last"):
        fit(tmp_path, outage, "after", after=[callbacks.EMAWeightAveraging(decay=0.9)])


def test_what_was_pickled_by_permission_is_read_by_it(tmp_path, outage):
    """A hyperparameter of a type that isn't plain data: without permission it isn't even saved."""
    outage.options["allow_pickle"] = True
    outage.at = 5
    fit(tmp_path, outage, "cut")
    outage.over()
    after, _, end = fit(tmp_path, outage, "cut")

    assert (end, min(after.seen)) == (None, 5)
    assert Path("/data") == after.hparams["root"]


def test_a_stop_at_the_very_last_step_is_a_run_that_is_complete(tmp_path, outage):
    """It halts there as anywhere; the next life has nothing to train, and holds the trained weights."""
    outage.at = 12
    before, _, halted = fit(tmp_path, outage, "cut", validate=True)
    outage.over()
    after, _, end = fit(tmp_path, outage, "cut", validate=True)

    assert halted is not None
    assert (halted.step, end, after.seen) == (12, None, {})
    assert torch.equal(before.seen[12], after.net[0].weight)
    assert list((tmp_path / "cut" / RESUMING).iterdir()) == []


def test_its_own_signal_code_is_refused(tmp_path, outage, monkeypatch):
    """The Slurm handler, which saves inside a signal handler, and a strategy that gathers by collectives."""
    plugins = [SLURMEnvironment(auto_requeue=True)]
    for key, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "job", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UsageError, match="auto_requeue=False"):
        fit(tmp_path, outage, "slurm", plugins=plugins)


def test_a_wrapped_sampler_without_a_generator_is_told_of(tmp_path, outage, capfd):
    """What it draws from isn't known; nothing is said of one with a generator."""
    fit(tmp_path, outage, "known", loader=wrapped)
    assert "draws the order anew" not in capfd.readouterr().err
    inside = torch.utils.data.RandomSampler(DATA)
    loader = stateful.StatefulDataLoader(DATA, batch_size=3, sampler=DistributedSamplerWrapper(inside, 1, 0))
    fit(tmp_path, outage, "unknown", loader=loader)
    assert "RandomSampler: a restart draws the order anew" in capfd.readouterr().err


def test_a_plain_loader_is_told_of(tmp_path, outage, capfd):
    """Lightning begins such an epoch anew, and it is said."""
    fit(tmp_path, outage, "plain", loader=torch.utils.data.DataLoader(DATA, batch_size=3, shuffle=True))

    assert "train_dataloader can't tell its position" in capfd.readouterr().err
