"""What packagers install: the example configuration tells the truth, and units keep what they promise."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from powerguard.config import Config, loads
from powerguard.core.policy import Policy
from powerguard.errors import EXIT_REQUEUE

SYSTEMD = Path(__file__).resolve().parents[1] / "systemd"
EXAMPLE = (SYSTEMD / "powerguard.toml").read_text()
EXPOSURE_MAX = 1.7


@pytest.fixture
def credentials(tmp_path) -> dict[str, str]:
    """What LoadCredential= in the unit makes."""
    (tmp_path / "nut-password").write_text("secret\n")
    return {"CREDENTIALS_DIRECTORY": str(tmp_path)}


def uncommented(text: str) -> str:
    """The example with every commented key in force, as an operator would try them."""
    return re.sub(r"^# (?=\w+ = |\[\[)", "", text, flags=re.MULTILINE)


def test_the_example_loads(credentials):
    """The file as it is shipped is a whole configuration, with the credential that the unit passes."""
    config = loads(EXAMPLE, env=credentials)

    assert config.ups[0].password.reveal() == "secret"
    assert config.halt.method == "logind"
    assert "LoadCredential=nut-password:/etc/powerguard/nut-password" in (SYSTEMD / "powerguard.service").read_text()


def test_commented_lines_show_the_defaults(credentials):
    """Every `# key = value` of [policy], [node] and [log] is the default: uncommenting it changes nothing."""
    keys: dict[str, object] = {}
    table = ""
    for line in EXAMPLE.splitlines():
        table = found[1] if (found := re.match(r"\[+(\w+)\]", line)) else table
        if found := re.match(r"# (\w+) = ([^#]+)", line):
            keys[f"{table}.{found[1]}"] = found[2].strip()
    shown = {key for key in keys if key.startswith("policy.")}
    wanted = {f"policy.{f.name}" for f in msgspec.structs.fields(Policy)} - {
        "policy.feeds",
        "policy.min_supplies",
        "policy.outages",
    }

    assert wanted - shown <= {"policy.time_scale"}
    policy = "\n".join(f"{key.partition('.')[2]} = {value}" for key, value in keys.items() if key in shown)
    default = loads('[[ups]]\nname = "a"', env={})
    assert loads(f'[[ups]]\nname = "a"\n[policy]\n{policy}', env={}).policy == default.policy
    for key, value in keys.items():
        table, name = key.split(".")
        if table in ("node", "log") and name != "name":
            assert msgspec.json.decode(str(value)) == getattr(getattr(default, table), name), key


def test_every_key_of_the_configuration_is_in_the_example():
    """No setting is hidden: each key of each table is shown, commented or not."""
    for table in ("node", "peers", "halt", "shed", "metrics", "log", "notify"):
        kind = next(f.type for f in msgspec.structs.fields(Config) if f.name == table)
        for field in msgspec.structs.fields(kind):
            assert re.search(rf"^#? ?{field.name} = ", EXAMPLE, re.MULTILINE), f"{table}.{field.name}"
    keys = "name user password password_file tls tls_ca answer_max_s battery_installed rated chemistry learned_phi"
    for key in keys.split():
        assert re.search(rf"^#? ?{key} = ", EXAMPLE, re.MULTILINE), key


def test_each_line_of_the_example_stands_alone(credentials, tmp_path):
    """With everything uncommented the file is still valid, but for what excludes each other and doesn't exist."""
    text = uncommented(EXAMPLE)
    text = re.sub(r'^(password|tls_ca) = "".*$', "", text, flags=re.MULTILINE)
    text = text.replace('method = "logind"', 'method = "command"')

    assert len(loads(text, env=credentials).ups) == 2


def unit(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (SYSTEMD / name).read_text().splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_unit_powers_off_for_real_without_root_and_outlives_the_others():
    """--really, notify, a watchdog, always restarted, its own user, no capability, not stopped by a shutdown."""
    service = unit("powerguard.service")

    assert service["Type"] == ["notify"]
    assert service["ExecStart"][0].endswith("run -c /etc/powerguard/powerguard.toml --really")
    assert 5 <= int(service["WatchdogSec"][0]) <= 60
    assert service["Restart"] == ["always"]
    assert service["StartLimitIntervalSec"] == ["0"]
    assert service["User"] == ["powerguard"]
    assert service["CapabilityBoundingSet"] == [""]
    assert service["NoNewPrivileges"] == ["yes"]
    assert service["DefaultDependencies"] == ["no"]
    assert "Conflicts" not in service
    assert int(service["OOMScoreAdjust"][0]) <= -500


def test_the_training_example_is_stopped_first_and_requeues():
    """It is ordered after the daemon, gets time to flush, and its 75 isn't a crash."""
    training = unit("training-example.service")

    assert any("powerguard.service" in value for value in training["After"])
    assert training["KillMode"] == ["mixed"]
    assert int(training["TimeoutStopSec"][0]) >= 60
    assert training["RestartPreventExitStatus"] == [str(EXIT_REQUEUE)]


def test_polkit_allows_power_off_and_no_reboot():
    """The rule is for one user and the actions of a power-off."""
    rule = (SYSTEMD / "powerguard.rules").read_text()
    code = "\n".join(line for line in rule.splitlines() if not line.lstrip().startswith("//"))

    assert 'subject.user === "powerguard"' in code
    assert "power-off-ignore-inhibit" in code
    assert "reboot" not in code.replace("inhibit", "")
    for opening, closing in ("()", "[]", "{}"):
        assert code.count(opening) == code.count(closing)


@pytest.mark.slow
def test_systemd_finds_the_unit_hardened():
    """`systemd-analyze security` gives an exposure of at most 1.7."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(SYSTEMD / "powerguard.service")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.search(r"Overall exposure level for powerguard.service: ([\d.]+)", done.stdout)
    if found is None:
        pytest.skip(f"this systemd-analyze can't look at a file: {done.stderr.strip()}")

    assert float(found[1]) <= EXPOSURE_MAX


@pytest.mark.slow
@pytest.mark.parametrize("name", ["powerguard.service", "training-example.service"])
def test_systemd_understands_every_line(name, tmp_path):
    """`systemd-analyze verify` has nothing to say but that programs and manual pages aren't installed here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    for file in SYSTEMD.glob("*.service"):
        shutil.copy(file, tmp_path)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)], capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if name in line and "is not executable" not in line]

    assert complaints == []
