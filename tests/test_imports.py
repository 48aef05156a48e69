"""Who may import whom, and what an import needs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

WITHOUT = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None  # any import of it raises ImportError
import {module}
loaded = sorted(m for m in {watched!r} if sys.modules.get(m) is not None)
print(" ".join(loaded))
"""


def imports(module, *, blocked=(), watched=()):
    """What importing *module* in a fresh interpreter loads of *watched*."""
    code = WITHOUT.format(blocked=blocked, module=module, watched=watched)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "" == done.stderr
    return done.stdout.split()


def test_base_import_needs_neither_torch_nor_nut():
    """`import powerguard` works where only the base dependencies are installed."""
    blocked = ("torch", "pynut2", "typer", "rich", "jeepney", "prometheus_client", "matplotlib", "numpy")

    assert [] == imports("powerguard", blocked=blocked, watched=("torch", "zmq", "pynut2"))


@pytest.mark.parametrize("module", ["powerguard.node.daemon", "powerguard.cli", "powerguard.sim.world"])
def test_daemon_side_never_imports_torch(module):
    """Neither the daemon nor the command line loads torch or numpy, which would cost 200 MB and seconds."""
    assert [] == imports(module, blocked=("torch",), watched=("torch", "numpy"))


@pytest.mark.slow
def test_import_contracts_hold():
    """The layers of the house are kept."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert 0 == done.returncode, done.stdout
