"""Hooks that need no framework: the optimizer's, Megatron's handler and torchtitan's manager around their own loops."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import powerguard  # noqa: E402
from powerguard.integrations.halted import Halted  # noqa: E402
from powerguard.integrations.megatron import OptimizerShards, SignalHandler  # noqa: E402
from powerguard.integrations.optimizer_hook import guard_optimizer  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 12


class Data:
    """Batches with a position."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < 2 * STEPS:
            self.position += 1
            yield torch.randn(4, 4, generator=torch.Generator().manual_seed(self.position))

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def parts():
    """A model with dropout, its optimizer and its schedule."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    return net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def untouched(net, optimizer, schedule, data, *, seen, outage):
    """A training loop as people have it: accumulation, a schedule, and no word of powerguard."""
    for i, batch in enumerate(data):
        (net(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        if i % 2 == 0:
            continue
        seen.append((net[0].weight.detach().clone(), optimizer.param_groups[0]["lr"]))
        outage.tick(len(seen))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def hooked(folder, outage):
    net, optimizer, schedule = parts()
    data, seen = Data(), []
    state = {"model": net, "schedule": schedule, "data": data}
    guard = guard_optimizer(state, folder, optimizer, schedule=schedule, **outage.options)
    try:
        untouched(net, optimizer, schedule, data, seen=seen, outage=outage)
    except Halted as halted:
        return guard.resumed_steps, seen, halted
    finally:
        guard.close()
    return guard.resumed_steps, seen, None


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) and lr == rate for (a, lr), (b, rate) in zip(one, other, strict=True)
    )


def test_a_loop_that_knows_nothing_is_resumed_bit_by_bit(tmp_path, outage):
    """The optimizer's hook alone: no boundary inside an accumulation, none between the optimizer and its schedule."""
    _, whole, _ = hooked(tmp_path / "whole", outage)
    outage.at = 5
    _, before, halted = hooked(tmp_path / "cut", outage)
    outage.over()
    done, after, end = hooked(tmp_path / "cut", outage)

    assert halted is not None
    assert (halted.code, end, done) == (75, None, halted.step)
    assert len(before) == halted.step
    assert same(whole, before + after)


def test_a_closed_hook_leaves_optimizer_and_schedule_as_they_were(tmp_path, outage):
    """After `close`, steps are no boundaries."""
    net, optimizer, schedule = parts()
    guard = guard_optimizer({"model": net}, tmp_path, optimizer, schedule=schedule, **outage.options)
    guard.close()
    optimizer.step()
    schedule.step()

    assert guard.steps == 0
    assert type(schedule) is torch.optim.lr_scheduler.CosineAnnealingLR


def test_two_steps_of_an_optimizer_can_be_one_of_the_run(tmp_path, outage):
    """`steps_each`: a boundary at every second step only."""
    net, optimizer, _ = parts()
    guard = guard_optimizer({"model": net}, tmp_path, optimizer, steps_each=2, **outage.options)
    for _ in range(5):
        optimizer.step()
    guard.close()

    assert guard.steps == 2


class MegatronOptimizer:
    """The outside of megatron.core's mixed-precision optimizers: fp32 weights of its own, an inner optimizer."""

    def __init__(self, net):
        self.net = net
        self.main = [p.detach().float().clone().requires_grad_() for p in net.parameters()]
        self.optimizer = torch.optim.AdamW(self.main, lr=0.05)
        self.grad_scaler = None

    def step(self):
        for main, param in zip(self.main, self.net.parameters(), strict=True):
            main.grad = param.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for main, param in zip(self.main, self.net.parameters(), strict=True):
                param.copy_(main)
                param.grad = None

    def state_dict(self):
        raise AssertionError("leaves the shards out")


def megatron(folder, outage):
    """Megatron's training loop, as far as it concerns a signal handler."""
    torch.manual_seed(3)
    net = torch.nn.Linear(4, 1).bfloat16()
    optimizer = MegatronOptimizer(net)
    guard = powerguard.attach({"model-0": net, "optimizer": OptimizerShards(optimizer)}, folder, **outage.options)
    step = guard.resume()
    iteration = max(0, step - 1)
    seen = []
    with guard, SignalHandler(guard, lambda: iteration) as handler:
        try:
            while iteration < STEPS:
                batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(iteration)).bfloat16()
                (net(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                iteration += 1
                seen.append([main.detach().clone() for main in optimizer.main])
                outage.tick(iteration)
                if any(handler.signals_received()):
                    raise AssertionError("Megatron would save by itself")
        except Halted as halted:
            return seen, halted
    return seen, None


def test_megatrons_handler_is_the_boundary(tmp_path, outage):
    """No collective, no save of Megatron's; the fp32 weights that its optimizer keeps come back bit by bit."""
    whole, _ = megatron(tmp_path / "whole", outage)
    outage.at = 5
    before, halted = megatron(tmp_path / "cut", outage)
    outage.over()
    after, _ = megatron(tmp_path / "cut", outage)

    assert halted is not None
    assert halted.code == 75
    together = before + after
    assert len(together) == len(whole) == STEPS
    assert all(
        torch.equal(a, b) for one, other in zip(whole, together, strict=True) for a, b in zip(one, other, strict=True)
    )


def torchtitan_trainer(folder, outage):
    """The parts of torchtitan's Trainer that a checkpoint manager sees, around the real one."""
    dcp = pytest.importorskip(
        "torchtitan.components.checkpointer.dcp", reason="torchtitan isn't installed (make setup)"
    )
    net, optimizer, schedule = parts()

    class Trainer:
        step = 0

        def state_dict(self):
            return {"step": self.step}

        def load_state_dict(self, state):
            self.step = state["step"]

        def train(self):
            self.checkpointer.load(step=-1)
            for batch in self.data:
                self.step += 1
                (net(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                self.seen.append((net[0].weight.detach().clone(), schedule.get_last_lr()[0]))
                outage.tick(self.step)
                self.checkpointer.save(self.step, last_step=self.step == 2 * STEPS)

    trainer = Trainer()
    trainer.seen, trainer.data = [], Data()
    config = dcp.CheckpointManager.Config(enable=True, interval=1000, keep_latest_k=0)
    trainer.checkpointer = dcp.CheckpointManager(
        config, dataloader=trainer.data, model_parts=[net], optimizers=optimizer, lr_schedulers=schedule,
        states={"train_state": trainer}, sd_adapter=None, base_folder=str(folder / "titan"),
    )  # fmt: skip
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_torchtitans_manager_is_wrapped(tmp_path, outage, monkeypatch):
    """The real CheckpointManager of torchtitan: the whole state is saved at the boundary and restored, numbers too."""
    from powerguard.integrations.torchtitan import guard_trainer

    def run(name):
        trainer = torchtitan_trainer(tmp_path / name, outage)
        monkeypatch.setattr(trainer.checkpointer, "last_save_model_only", True)
        guarded = guard_trainer(trainer, tmp_path / name / "powerguard", **outage.options)
        try:
            trainer.train()
        except Halted as halted:
            return trainer.seen, halted
        finally:
            guarded.guard.close()
        return trainer.seen, None

    saved = []
    dcp = pytest.importorskip(
        "torchtitan.components.checkpointer.dcp", reason="torchtitan isn't installed (make setup)"
    )
    monkeypatch.setattr(dcp.CheckpointManager, "_save", lambda _self, step, last: saved.append((step, last)) or True)
    whole, _ = run("whole")
    del saved[:]
    outage.at = 5
    before, halted = run("cut")
    outage.over()
    ours = list(saved)
    after, end = run("cut")

    assert halted is not None
    assert (halted.code, end) == (75, None)
    assert ours == [(step, False) for step in range(1, halted.step)], "its own save ran as well"
    assert same(whole, before + after)
