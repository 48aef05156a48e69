"""The helper for DeepSpeed's engine, with the real deepspeed on the CPU and a tiny model with dropout."""

from __future__ import annotations

import socket

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="deepspeed isn't installed (make setup)")

from powerguard.integrations.deepspeed import guarded  # noqa: E402
from powerguard.integrations.halted import Halted  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

STEPS = 8


@pytest.fixture(scope="module")
def alone():
    """One rank, as torchrun starts it; DeepSpeed can't be initialised twice in a process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    me = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in me.items():
            patch.setenv(key, str(value))
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def train(folder, outage, stage, extra):
    """One life of a run: the loss of each micro-batch, and how it ended."""
    import deepspeed

    torch.manual_seed(3)
    norm = torch.nn.LayerNorm(8) if extra else torch.nn.BatchNorm1d(8)  # a batch norm has buffers
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), norm, torch.nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
        "zero_optimization": {"stage": stage},
        **extra,
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    guard = guarded(engine, folder, **outage.options)
    losses = []
    try:
        guard.resume()
        while engine.global_steps < STEPS:
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(engine.micro_steps))
            loss = (engine(x.to(next(net.parameters()).dtype)).float() - x.sum(1, keepdim=True)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append((engine.micro_steps, loss.item(), engine.get_lr()[0]))
            outage.tick(engine.global_steps)
            guard.boundary()
    except Halted as halted:
        return losses, halted
    finally:
        guard.close()
        engine.destroy()
    return losses, None


@pytest.mark.parametrize(("stage", "extra"), [(1, {"bf16": {"enabled": True}}), (2, {}), (3, {})])
def test_a_run_is_resumed_bit_by_bit(tmp_path, outage, alone, stage, extra):
    """Stopped after some step: losses and learning rates after it are the run's that nobody stopped.

    No micro-batch inside an accumulation is taken for a boundary, no barrier of its own save is called.
    """
    whole, _ = train(tmp_path / "whole", outage, stage, extra)
    outage.at = 4
    before, halted = train(tmp_path / "cut", outage, stage, extra)
    outage.over()
    after, end = train(tmp_path / "cut", outage, stage, extra)

    assert halted is not None
    assert (halted.code, end) == (75, None)
    assert before[-1][0] == 2 * halted.step
    assert whole == before + after
