"""The helper for Accelerate's loops, with the real accelerate and a tiny model with dropout."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate", reason="accelerate isn't installed (make setup)")
pytest.importorskip("torchdata", reason="torchdata isn't installed (make setup)")

from accelerate.utils import DataLoaderConfiguration  # noqa: E402

from powerguard.errors import StateError  # noqa: E402
from powerguard.integrations.accelerate import guarded  # noqa: E402
from powerguard.integrations.halted import Halted  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))


class Data(torch.utils.data.Dataset):
    """Augments with the global random numbers, as people do."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return (X[i] + 0.1 * torch.randn(4),)


DATA = Data()
STEPS_PER_EPOCH = 4
EPOCHS = 3


def train(folder, outage, *, stateful=True, seedable=True):
    """One life of a run: the weights after each step, and how it ended."""
    torch.manual_seed(3)
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful, use_seedable_sampler=seedable),
    )
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    loader = torch.utils.data.DataLoader(DATA, batch_size=3, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    guard = guarded(accelerator, folder, loader=loader, **outage.options)
    seen = {}
    try:
        done = guard.resume()
        for _epoch in range(done // STEPS_PER_EPOCH, EPOCHS):
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    done += 1
                    seen[done] = net[0].weight.detach().clone()
                    outage.tick(done)
                guard.boundary()
    except Halted as halted:
        return seen, halted
    finally:
        guard.close()
    return seen, None


@pytest.mark.parametrize("at", [4, 5, 7])
def test_a_run_is_resumed_bit_by_bit(tmp_path, outage, at):
    """Stopped inside an epoch, or at one's last step: what comes after equals the run that nobody stopped.

    That covers the traps of such loops: micro-batches that are no steps, a loader that is a batch ahead and has drawn
    random numbers for it, an epoch that begins anew.
    """
    whole, _ = train(tmp_path / "whole", outage)
    outage.at = at
    before, halted = train(tmp_path / "cut", outage)
    outage.over()
    after, end = train(tmp_path / "cut", outage)

    assert halted is not None
    assert (halted.code, end) == (75, None)
    together = before | after
    assert {step: torch.equal(weight, together[step]) for step, weight in whole.items()} == dict.fromkeys(whole, True)
    assert min(after) == halted.step + 1


def test_a_loader_without_a_position_is_refused(tmp_path, outage):
    """It is said how to make it tell."""
    with pytest.raises(StateError, match="use_stateful_dataloader=True"):
        train(tmp_path, outage, stateful=False)


def test_an_order_that_is_drawn_anew_is_told_of(tmp_path, outage, capfd):
    """A shuffle that doesn't go by seed and epoch."""
    train(tmp_path, outage, seedable=False)

    assert "use_seedable_sampler=True" in capfd.readouterr().err
