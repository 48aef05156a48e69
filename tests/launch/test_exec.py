"""`powerguard exec` with programs as people have them, a real daemon and a simulated UPS."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from powerguard.drill.daemon import DaemonProcess
from powerguard.drill.plan import PLANS
from powerguard.drill.processes import Herd, adopt_orphans
from powerguard.drill.trial import RunningDaemon, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(600)]

PATIENCE_S = 120.0

SIGTERM_SAVE = """
import signal, sys, time, pathlib
folder, save_s = pathlib.Path(sys.argv[1]), float(sys.argv[2])
def save(number, frame):
    time.sleep(save_s)                       # a save takes its time
    (folder / "checkpoint.pt").write_text(f"step {step}")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
for step in range(10**9):
    (folder / "alive").write_text(str(step))
    time.sleep(0.02)
"""

SLOW_SAVE = """
import signal, sys, time, pathlib
folder = pathlib.Path(sys.argv[1])
def save(number, frame):
    with open(folder / "checkpoint.pt", "wb") as file:      # there at once, as torch.save's
        for _ in range(3):
            time.sleep(1.5)
            file.write(b"a piece")
            file.flush()
signal.signal(signal.SIGUSR1, save)
while True:
    (folder / "alive").write_text("yes")
    time.sleep(0.02)
"""

RANK = """
import os, signal, sys, time, pathlib
folder = pathlib.Path(sys.argv[1])
rank = os.environ["RANK"]
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
worker = os.fork()                           # as a data loader's
if worker == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while os.getppid() != 1:
        time.sleep(0.1)
    os._exit(0)
step = 0
while not asked:
    step += 1
    (folder / f"alive-{rank}").write_text(str(step))
    time.sleep(0.02)
time.sleep(1.0)
ended, _ = os.waitpid(worker, os.WNOHANG)
(folder / f"checkpoint-{rank}.pt").write_text("worker lives" if ended == 0 else "worker was killed")
os.kill(worker, signal.SIGKILL)
"""


class Exec:
    """One `powerguard exec`."""

    def __init__(self, daemon, folder, options, command):
        self.folder = folder
        env = {**os.environ, **daemon.env, "POWERGUARD_JOB_ID": "job"}
        self.log = folder / "exec.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "powerguard.cli", "exec", *options, "--", *command],
                env=env,
                stdout=log,
                stderr=log,
            )

    def until(self, holds, what):
        wait_for(holds, PATIENCE_S, f"{what}; it said: {self.log.read_text()}")

    def ends(self):
        self.until(lambda: self.process.poll() is not None, "exec to end")
        return self.process.returncode


@pytest.fixture
def powerguard_daemon(ups, tmp_path):
    """As the plugin's, but it parks soon after the mains have failed, and halts soon after that."""
    folder = tmp_path / "powerguard"
    folder.mkdir()
    adopt_orphans()
    herd = Herd()
    policy = {**replace(PLANS["blackout"], on_battery="park", runtime_s=60.0).policy(), "park_max_s": 2.0}
    each = RunningDaemon(DaemonProcess(folder, ups.address, policy, herd), herd)
    try:
        each.start()
        yield each
        each.process.stop(10.0)
    finally:
        each.cut()
        each.process.close()


@pytest.fixture
def launch(powerguard_daemon, tmp_path):
    """Starts exec, waits until program and daemon know each other; nothing is left running."""
    started = []

    def start(options, command, *, alive="alive"):
        one = Exec(powerguard_daemon, tmp_path, options, command)
        started.append(one)
        one.until((tmp_path / alive).exists, "the program to run")
        one.until(powerguard_daemon.steps, "exec to register")
        return one

    yield start
    for one in started:
        with contextlib.suppress(ProcessLookupError):
            one.process.terminate()
        one.process.wait(PATIENCE_S)


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def test_a_script_with_its_own_sigterm_save(launch, powerguard_daemon, ups, tmp_path):
    """Saved before the deadline, not killed while it saves, 75 at the end; the node halts only then."""
    run = launch(["--takes", "3"], [sys.executable, script(tmp_path, SIGTERM_SAVE), str(tmp_path), "2"])
    ups.cut_mains()
    run.until((tmp_path / "checkpoint.pt").exists, "the program's save")

    assert not powerguard_daemon.halted
    run.until(lambda: powerguard_daemon.halted, "the halt")
    assert run.ends() == 75
    assert (tmp_path / "checkpoint.pt").read_text().startswith("step ")
    assert "SIGTERM sent" in run.log.read_text()
    assert powerguard_daemon.status["jobs"][0]["saved_step"] is not None


def test_mains_back_the_program_is_started_again(launch, powerguard_daemon, ups, tmp_path):
    """With --restart; without it would end with 75. A snapshot before it, which it can't make, leaves it alone."""
    run = launch(["--restart"], [sys.executable, script(tmp_path, SIGTERM_SAVE), str(tmp_path), "0"])
    powerguard_daemon.order("flush")
    run.until(lambda: powerguard_daemon.status["jobs"][0]["why"], "the word that it can't snapshot")
    assert run.process.poll() is None
    assert not (tmp_path / "checkpoint.pt").exists()
    powerguard_daemon.order("park")
    run.until((tmp_path / "checkpoint.pt").exists, "the program's save")
    powerguard_daemon.wait_for("parked", PATIENCE_S)
    (tmp_path / "alive").unlink()
    powerguard_daemon.order("resume")

    run.until((tmp_path / "alive").exists, "the program to run again")
    run.process.send_signal(signal.SIGTERM)  # forwarded
    assert run.ends() == 0


def test_torchrun_of_two_ranks(launch, powerguard_daemon, tmp_path):
    """One exec for all: each rank gets SIGTERM, no worker of a loader does, and torchrun's 30 s never begin."""
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    run = launch([], [*torchrun, script(tmp_path, RANK), str(tmp_path)], alive="alive-1")
    run.until((tmp_path / "alive-0").exists, "rank 0")
    powerguard_daemon.order("park")
    powerguard_daemon.wait_for("parked", PATIENCE_S)
    powerguard_daemon.order("resume")

    assert run.ends() == 75
    assert [(tmp_path / f"checkpoint-{rank}.pt").read_text() for rank in (0, 1)] == ["worker lives"] * 2


LIGHTNING = """
import pathlib, signal, sys, torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
class Alive(Callback):
    def on_train_batch_end(self, trainer, *args):
        pathlib.Path(sys.argv[1], "alive").write_text(str(trainer.global_step))
trainer = Trainer(accelerator="cpu", devices=1, max_epochs=-1, logger=False, enable_progress_bar=False,
                  callbacks=[Alive()], enable_checkpointing=False, enable_model_summary=False,
                  default_root_dir=sys.argv[1],
                  plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)])
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4))
"""


def test_lightning_with_slurms_usr1(launch, powerguard_daemon, tmp_path, monkeypatch):
    """Its Slurm handler saves on SIGUSR1 and trains on: known by the file, and left alone."""
    pytest.importorskip("lightning.pytorch", reason="lightning isn't installed (make setup)")
    for key, value in {
        "JOB_ID": "7",
        "NTASKS": "1",
        "JOB_NAME": "train",
        "PROCID": "0",
        "LOCALID": "0",
        "NODEID": "0",
    }.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    options = ["--signal", "USR1", "--saved", f"file:{tmp_path}/hpc_ckpt_*.ckpt"]
    run = launch(options, [sys.executable, script(tmp_path, LIGHTNING), str(tmp_path)])
    powerguard_daemon.order("park")
    powerguard_daemon.wait_for("parked", PATIENCE_S)

    assert [path.name for path in tmp_path.glob("hpc_ckpt_*")] == ["hpc_ckpt_1.ckpt"]
    assert "SIGUSR1 sent" in run.log.read_text()
    assert run.process.poll() is None
    powerguard_daemon.order("resume")


def test_a_file_that_is_still_open_is_no_save(launch, powerguard_daemon, tmp_path):
    """There from the start, and silent for longer between two writes than one that is done: waited for all the same."""
    options = ["--signal", "USR1", "--takes", "8", "--saved", f"file:{tmp_path}/*.pt"]
    launch(options, [sys.executable, script(tmp_path, SLOW_SAVE), str(tmp_path)])
    powerguard_daemon.order("park")
    powerguard_daemon.wait_for("parked", PATIENCE_S)

    assert b"a piece" * 3 == (tmp_path / "checkpoint.pt").read_bytes()
    powerguard_daemon.order("resume")


def test_a_program_that_goes_on_is_known_by_its_words(launch, powerguard_daemon, tmp_path):
    """--saved log: the save is done with the line, and the program, which still runs, is left alone."""
    text = (
        "import signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('checkpoint written', flush=True))\n"
        "while True:\n    (pathlib.Path(sys.argv[1]) / 'alive').write_text('x')\n    time.sleep(0.02)\n"
    )
    options = ["--signal", "USR1", "--snapshot-signal", "USR1", "--saved", "log:checkpoint written"]
    run = launch(options, [sys.executable, script(tmp_path, text), str(tmp_path)])
    powerguard_daemon.order("park")
    powerguard_daemon.wait_for("parked", PATIENCE_S)
    powerguard_daemon.order("resume")
    powerguard_daemon.wait_for("online", PATIENCE_S)

    assert run.process.poll() is None
    assert "checkpoint written" in run.log.read_text()


def test_a_program_without_a_handler_is_told_of(launch, powerguard_daemon, tmp_path):
    """SIGTERM killed it: nobody takes that for a save."""
    text = (
        "import sys, time, pathlib\nwhile True:\n    pathlib.Path(sys.argv[1], 'alive').touch()\n    time.sleep(.02)\n"
    )
    run = launch([], [sys.executable, script(tmp_path, text), str(tmp_path)])
    powerguard_daemon.order("park")
    run.until(lambda: "it has no handler" in run.log.read_text(), "the word about it")
    powerguard_daemon.order("resume")

    assert run.ends() == 75


@pytest.mark.parametrize(("command", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137)])
def test_without_an_outage_its_exit_code_is_passed_on(tmp_path, command, code):
    """And with no daemon at all it simply runs."""
    env = {**os.environ, "POWERGUARD_SOCKET": str(tmp_path / "nobody.sock")}
    words = [sys.executable, "-m", "powerguard.cli", "exec", "--", "sh", "-c", command]

    assert subprocess.run(words, env=env, check=False, timeout=PATIENCE_S, capture_output=True).returncode == code


def test_what_cant_be_started_is_one_line(tmp_path):
    """Exit code 2, and what to check."""
    words = [sys.executable, "-m", "powerguard.cli", "exec", "--", "/nowhere/train"]
    ran = subprocess.run(words, check=False, timeout=PATIENCE_S, capture_output=True, text=True)

    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-1].startswith("powerguard: /nowhere/train: No such file")
