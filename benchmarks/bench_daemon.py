"""What the daemon costs a node, and how soon a rank hears of an outage, beside NUT's own upsmon in the same run.

    python benchmarks/bench_daemon.py           a table
    python benchmarks/bench_daemon.py --json    one JSON line
    python benchmarks/bench_daemon.py --quick   fewer outages

Both read the same simulated upsd (two UPSes) over TCP on loopback, the daemon every second; RSS is the kernel's VmRSS,
CPU that of the process (user and system), the median of six windows of ten seconds. An outage is a change of
`ups.status` at a random moment; the daemon's delay ends with the NOTICE on a rank's socket, upsmon's with its NOTIFYCMD
having begun, at POLLFREQ 5 (its default) and 1. upsmon does less: it counts no runway, keeps no journal and speaks with
no rank.

`bare_cpu_pct` is the floor of any Python here, over the same seconds: a loop that asks the same two UPSes once a
second and makes a table of each answer. `cold` says how much dearer the same walk through 3,000 small objects is after
a second of sleep than just before: where a virtual machine's neighbours keep the host's caches busy it is 10 to 60, and
every figure of CPU here grows with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from powerguard import wire
from powerguard.core.messages import Beat, Hello, Notice, Pace, Welcome
from powerguard.sim.nut import find, missing
from powerguard.sim.upsd import HEALTHY, SimUpsd

ROOT = Path(__file__).resolve().parents[1]
WINDOWS = 6
RSS_MAX_MIB, CPU_MAX_PCT = 60.0, 0.5
CONFIG = """[node]
run_dir = "{run}"
state_dir = "{folder}/state"
min_supplies = 2
[[ups]]
name = "{one}"
user = "secondary"
password = "secondarypw"
[[ups]]
name = "{two}"
user = "secondary"
password = "secondarypw"
[policy]
poll_online_s = 1
poll_battery_s = 1
resume_after_s = 1
snapshot = "never"
[halt]
delay_shutdown = false
[log]
level = "warning"
"""
UPSMON = """MONITOR {one} 1 secondary secondarypw secondary
MONITOR {two} 1 secondary secondarypw secondary
MINSUPPLIES 1
SHUTDOWNCMD "/bin/true"
POLLFREQ {poll}
POLLFREQALERT {poll}
NOTIFYCMD {notify}
NOTIFYFLAG ONBATT EXEC
NOTIFYFLAG ONLINE EXEC
RUN_AS_USER root
"""


BARE = """
import socket, sys, time
links = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(2)]
while True:
    time.sleep(1.0)
    for link, ups in zip(links, ("one", "two")):
        link.sendall(f"LIST VAR {ups}\\n".encode())
        answer = b""
        while not answer.endswith(f"END LIST VAR {ups}\\n".encode()):
            answer += link.recv(65536)
        dict(line.split(" ", 3)[2:] for line in answer.decode().splitlines()[1:-1])
"""


class Process:
    """A child and what it takes."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.child = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def rss_mib(self) -> float:
        """Memory in use now."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def cpu_s(self) -> float:
        """Processor time so far, by the process's own clock (clock_getcpuclockid(3))."""
        return time.clock_gettime((~self.child.pid << 3) | 2)

    def watch(self, for_s: float, beside: Process | None = None) -> tuple[float, float, float]:
        """Memory at the end, and percent of a core, over *for_s* of quiet; the same of *beside* (0 without). Medians of
        six windows: a neighbour on the host comes and goes."""
        other = beside or self
        shares = []
        for _ in range(WINDOWS):
            began, ours, theirs = time.monotonic(), self.cpu_s(), other.cpu_s()
            time.sleep(for_s / WINDOWS)
            took = (time.monotonic() - began) / 100
            shares.append(((self.cpu_s() - ours) / took, (other.cpu_s() - theirs) / took))
        return self.rss_mib(), *(statistics.median(each) for each in zip(*shares, strict=True))

    def end(self) -> None:
        """Asked, then made to."""
        self.child.terminate()
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


class Rank:
    """A rank's socket: says HELLO, and waits for NOTICE."""

    def __init__(self, path: Path) -> None:
        self._context = zmq.Context()
        self._dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.IDENTITY, wire.identity("job", 0))
        self._dealer.connect(f"ipc://{path}")
        self._say(Hello("job", 0, 0, 1, os.getpid(), "/nowhere"))
        self.until(Welcome, 20.0)

    def until(self, kind: type, within_s: float) -> float:
        """When a message of that kind came; a beat is said meanwhile, so that the rank counts as alive."""
        ends = time.monotonic() + within_s
        while time.monotonic() < ends:
            if not self._dealer.poll(500):
                self._say(Beat(1, Pace(0.1, 0.1, 1.0, 0.1, 1)))
                continue
            frames = self._dealer.recv_multipart()
            if isinstance(wire.decode_to_rank(frames), kind):
                return time.monotonic()
        raise SystemExit(f"bench_daemon: no {kind.__name__} within {within_s:.0f} s")

    def _say(self, message) -> None:
        self._dealer.send_multipart(wire.encode(message))

    def close(self) -> None:
        self._context.destroy(linger=0)


def unit_environment() -> dict[str, str]:
    """What the unit sets for the daemon."""
    lines = (ROOT / "systemd/powerguard.service").read_text().splitlines()
    words = [word for line in lines if line.startswith("Environment=") for word in line[12:].split()]
    return dict(word.split("=", 1) for word in words)


def ready_s(config: Path, folder: Path) -> tuple[Process, float]:
    """A daemon, and how long it took from exec to READY=1."""
    path = str(folder / "notify")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        listener.settimeout(60)
        began = time.monotonic()
        command = [sys.executable, "-m", "powerguard.cli", "run", "-c", str(config)]
        daemon = Process(command, {**unit_environment(), "NOTIFY_SOCKET": path, "PYTHONPATH": str(ROOT)})
        while b"READY=1" not in listener.recv(4096):
            pass
        return daemon, time.monotonic() - began


def delays(
    upsd: SimUpsd, heard: Callable[[], float], calm: Callable[[], None], count: int, poll_s: float
) -> list[float]:
    """Seconds from the change in upsd to *heard*, *count* times; *calm* waits until the next may begin."""
    found = []
    for _ in range(count):
        time.sleep(random.uniform(0.0, poll_s))
        began = time.monotonic()
        upsd.set("one", {"ups.status": "OB DISCHRG", "battery.charge": "99"})
        found.append(heard() - began)
        upsd.set("one", {"ups.status": "OL", "battery.charge": "100"})
        calm()
    return found


def daemon_figures(upsd: SimUpsd, folder: Path, count: int, watch_s: float) -> dict[str, float]:
    """Start-up, memory, processor, and the delay to a rank."""
    run = Path(tempfile.mkdtemp(prefix="pg-bench-"))
    config = folder / "pg.toml"
    config.write_text(CONFIG.format(run=run, folder=folder, one=upsd.address("one"), two=upsd.address("two")))
    starts = []
    daemon, took = ready_s(config, folder)
    starts.append(took)
    try:
        for _ in range(2):
            daemon.end()
            daemon, took = ready_s(config, folder)
            starts.append(took)
        bare = Process([sys.executable, "-c", BARE, str(upsd.port)], {})
        try:
            time.sleep(3.0)
            rss, cpu, floor = daemon.watch(watch_s, bare)
        finally:
            bare.end()
        rank = Rank(run / "ranks.sock")
        found = delays(upsd, lambda: rank.until(Notice, 20.0), lambda: time.sleep(3.5), count, 1.0)
        rank.close()
    finally:
        daemon.end()
        shutil.rmtree(run, ignore_errors=True)
    figures = {"start_s": statistics.median(starts), "rss_mib": rss, "cpu_pct": cpu, "bare_cpu_pct": floor}
    return {**figures, "cold": cold(), **_spread(found)}


def cold() -> float:
    """How much dearer a walk through memory is after a second of sleep: the median of ten, by the median of ten hot."""
    things = [{"number": n, "text": str(n)} for n in range(3000)]

    def walk() -> float:
        began = time.thread_time()
        sum(thing["number"] + len(thing["text"]) for thing in things)
        return time.thread_time() - began

    walk()
    hot = statistics.median(walk() for _ in range(10))
    slept = []
    for _ in range(10):
        time.sleep(1.0)
        slept.append(walk())
    return statistics.median(slept) / hot


@contextlib.contextmanager
def upsmon(upsd: SimUpsd, folder: Path, poll: int) -> Iterator[tuple[Process, Path]]:
    """A real upsmon that polls so often, and the file that its NOTIFYCMD writes to."""
    etc, told = folder / f"upsmon-{poll}", folder / f"told-{poll}"
    etc.mkdir()
    told.write_text("")
    notify = etc / "notify"
    notify.write_text(f"#!/bin/sh\necho $NOTIFYTYPE >> {told}\n")
    notify.chmod(0o755)
    text = UPSMON.format(one=upsd.address("one"), two=upsd.address("two"), poll=poll, notify=notify)
    (etc / "upsmon.conf").write_text(text)
    (etc / "upsmon.conf").chmod(0o640)
    env = {"NUT_CONFPATH": str(etc), "NUT_STATEPATH": str(etc), "NUT_ALTPIDPATH": str(etc)}
    one = Process([str(find("upsmon")), "-F", "-p"], env)
    try:
        time.sleep(2.0 + poll)
        yield one, told
    finally:
        one.end()


def upsmon_figures(upsd: SimUpsd, folder: Path, poll: int, count: int, watch_s: float) -> dict[str, float]:
    """The same of upsmon, as far as it has them."""

    def seen(word: str) -> float:
        lines = told.read_text().count(word)
        ends = time.monotonic() + 30.0
        while told.read_text().count(word) == lines:
            if time.monotonic() > ends:
                raise SystemExit(f"bench_daemon: upsmon never told {word}")
            time.sleep(0.002)
        return time.monotonic()

    with upsmon(upsd, folder, poll) as (process, told):
        rss, cpu, _ = process.watch(watch_s)
        found = delays(upsd, lambda: seen("ONBATT"), lambda: seen("ONLINE"), count, float(poll))
    return {"rss_mib": rss, "cpu_pct": cpu, **_spread(found)}


def _spread(found: list[float]) -> dict[str, float]:
    return {"delay_median_s": statistics.median(found), "delay_max_s": max(found)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--quick", action="store_true", help="fewer outages, a shorter watch")
    options = parser.parse_args()
    count, watch_s = (4, 12.0) if options.quick else (15, 60.0)
    random.seed(7)
    result: dict[str, object] = {
        "bench": "daemon",
        "count": count,
        "rss_max_mib": RSS_MAX_MIB,
        "cpu_max_pct": CPU_MAX_PCT,
    }
    folder = Path(tempfile.mkdtemp(prefix="pg-bench-daemon-"))
    try:
        with SimUpsd() as upsd:
            for name in ("one", "two"):
                upsd.replace(name, HEALTHY)
            ours = daemon_figures(upsd, folder, count, watch_s)
            result["powerguard"] = ours
            why = missing("upsmon")
            if why or os.geteuid() != 0:
                result["upsmon"] = why or "upsmon is started as root here"
            else:
                for poll in (5, 1):
                    result[f"upsmon_pollfreq_{poll}"] = upsmon_figures(
                        upsd, folder, poll, max(3, count // 3) if poll == 5 else count, watch_s
                    )
                theirs = result["upsmon_pollfreq_5"]
                assert isinstance(theirs, dict)
                result["ratio"] = theirs["delay_median_s"] / ours["delay_median_s"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result["ok"] = ours["rss_mib"] <= RSS_MAX_MIB and ours["cpu_pct"] <= CPU_MAX_PCT
    if options.json:
        print(json.dumps(result))
    else:
        for name, values in result.items():
            shown = ", ".join(f"{k} {v:.2f}" for k, v in values.items()) if isinstance(values, dict) else values
            print(f"{name:<20} {shown}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
