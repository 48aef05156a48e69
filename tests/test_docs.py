"""The pages in docs/ say what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from powerguard.cli import app
from powerguard.config import loads

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("hil/*.md")])


def test_the_configuration_reference_is_the_types():
    """Made anew, the page is the same; if not: python .make/configuration.py --write"""
    made = subprocess.run(
        [sys.executable, str(ROOT / ".make" / "configuration.py")], capture_output=True, text=True, check=True
    )
    assert made.stdout == (ROOT / "docs" / "configuration.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    """Every link to a file or a heading of ours leads to one."""
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)", page.read_text()):
        name, _, anchor = target.partition("#")
        aim = page if not name else page.parent / name
        assert aim.exists(), target
        if anchor and aim.suffix == ".md":
            assert anchor in {_anchor(line) for line in re.findall(r"^#+ (.*)$", aim.read_text(), re.MULTILINE)}, target


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_named_exist(page: Path):
    """`powerguard WORD` in a page is a command, so that nobody types one that isn't there."""
    known = {command.name or command.callback.__name__ for command in app.build().registered_commands}
    known |= {group.name for group in app.build().registered_groups} | {"trace"}  # the name of a format
    named = set(re.findall(r"`powerguard ([a-z][a-z-]+)", page.read_text()))
    assert named <= known, named - known


def test_the_manifests_are_kubernetes():
    """Each document is valid by the API's own schema, without a field that it doesn't know."""
    validate = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((ROOT / "docs" / "kubernetes" / "daemonset.yaml").read_text()))
    for document in documents:
        validate.validate(document, validate.latest_version(), strict=True)
    assert [document["kind"] for document in documents][-1] == "DaemonSet"


def test_the_daemonset_runs_a_configuration_that_loads(tmp_path):
    """The configuration in the manifest is one that the daemon takes."""
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((ROOT / "docs" / "kubernetes" / "daemonset.yaml").read_text())
    text = next(each for each in documents if each["kind"] == "ConfigMap")["data"]["powerguard.toml"]
    secret = tmp_path / "nut-password"
    secret.write_text("x")
    secret.chmod(0o600)
    taint = tmp_path / "taint"
    taint.write_text("#!/bin/sh\n")
    taint.chmod(0o755)
    text = text.replace("/etc/powerguard-secret/nut-password", str(secret)).replace("/etc/powerguard/taint", str(taint))
    assert loads(text, env={}).halt.method == "logind"


@pytest.mark.parametrize(
    ("facts", "does"),
    [
        ({"phase": "on_battery", "event": "e"}, "taint node gpu-07 --overwrite powerguard/on-battery=true:NoSchedule"),
        ({"phase": "online", "event": ""}, "taint node gpu-07 powerguard/on-battery-"),
        ({"job": "gpt", "step": 144}, ""),
        ({}, ""),
    ],
)
def test_a_node_is_tainted_by_a_phase_and_by_nothing_else(tmp_path, facts, does):
    """A generation that is durable only after the mains are back, or a worn battery, taints no node."""
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((ROOT / "docs" / "kubernetes" / "daemonset.yaml").read_text())
    script = next(each for each in documents if each["kind"] == "ConfigMap")["data"]["taint"]
    for name, text in {"taint": script, "kubectl": '#!/bin/sh\necho "$*"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NODE_NAME": "gpu-07"}
    env["POWERGUARD_FACTS"] = msgspec.json.encode(facts).decode()
    done = subprocess.run([tmp_path / "taint"], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == does


def test_every_command_has_a_word_in_the_guide():
    """docs/commands.md names each command, so that help and guide tell the same story."""
    text = (ROOT / "docs" / "commands.md").read_text()
    known = {command.name or command.callback.__name__ for command in app.build().registered_commands}
    known |= {group.name for group in app.build().registered_groups}
    assert {name for name in known if f"`powerguard {name}" not in text} == set()
