"""Every example through a blackout, by the pytest plugin: mains fail, all is killed, it runs again, same result.

pytest tests/integrations/test_examples.py -k lightning         # one of them
POWERGUARD_TEST_EXAMPLES=all make test                          # all of them
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from powerguard.generations import scan

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
ALL = os.environ.get("POWERGUARD_TEST_EXAMPLES") == "all"
NEEDS = {
    "fsdp2": ("torch", ["2"]),
    "untouched_loop": ("torchdata", ["1"]),
    "huggingface_trainer": ("transformers", ["1", "2"]),
    "lightning_callback": ("lightning", ["1", "2"]),
    "accelerate_loop": ("accelerate", ["1", "2"]),
    "deepspeed_engine": ("deepspeed", ["2", "2 --stage 1 --bf16", "2 --stage 3"]),
}
"""Which package an example needs, and with how many ranks, and which options, it is tried."""
RUNS = [(name, run) for name, (_, runs) in sorted(NEEDS.items()) for run in runs]


@pytest.mark.parametrize(("name", "run"), RUNS)
def test_an_example_survives_a_blackout(name, run, blackout, request):
    """Resumed bit by bit: the trained parameters equal those of a run that nobody interrupted.

    Several ranks stopped after the same step: their generation is whole, with a shard of each.
    """
    package, (ranks, options) = NEEDS[name][0], (int(run.split()[0]), run.split()[1:])
    asked = {word for word in re.findall(r"\w+", request.config.option.keyword or "") if len(word) > 3}
    if not (ALL or any(word in name for word in asked)):
        pytest.skip("takes a minute; POWERGUARD_TEST_EXAMPLES=all runs it, or -k with its name")
    pytest.importorskip(package, reason=f"{package} isn't installed (make setup-frameworks)")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    script = [str(EXAMPLES / f"{name}.py"), "--dir", "{checkpoints}", "--save", "{out}/model.pt", "--pace", "0.1"]

    survival = blackout.run([sys.executable, *torchrun, *script, *options], within_s=240.0)

    survival.assert_resumed_exactly()
    stopped = [one for one in scan(blackout.folder / "checkpoints") if one.step == survival.stop_step]
    assert [(one.whole, [shard.rank for shard in one.shards]) for one in stopped] == [(True, list(range(ranks)))]


def test_every_example_is_here():
    """A new example is to be tried too (tiny_gpt.py is what drills train, smallest_loop.py is the README's)."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"tiny_gpt", "smallest_loop"} == set(NEEDS)
