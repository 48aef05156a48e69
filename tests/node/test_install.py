"""Installing into a folder: what is put, what is kept, what is taken away; and the files as they ship."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerguard.config import FILE, loads
from powerguard.core.policy import Policy
from powerguard.errors import PowerguardError, UsageError
from powerguard.node import install, units
from powerguard.node.install import Command, Fate, File, Installed, Tools
from powerguard.node.program import ProgramFailed
from powerguard.node.ups_line import UpsAddress

SYSTEMD = Path(__file__).parents[2] / "systemd"
CONFIG = units.configuration({"rack@localhost": "Rack"})


def files(**changes) -> list[File]:
    return install.files("/opt/pg/bin/powerguard", CONFIG, **{"password": "secret-1", "delay": 300, **changes})


@pytest.fixture
def tools(tmp_path):
    return Tools(root=tmp_path)


def put_all(tools: Tools, what: Sequence[File]) -> dict[str, Fate]:
    installed = Installed(tools)
    fates = {file.path: installed.put(file) for file in what}
    installed.save()
    return fates


def test_everything_is_put_and_a_repeat_changes_nothing(tools):
    """All new, then all there; what was shown is what is done."""
    shown = {file.path: Installed(tools).fate(file) for file in files()}

    assert {Fate.NEW} == set(shown.values())
    assert shown == put_all(tools, files())
    before = {path: path.stat().st_mtime_ns for path in tools.root.rglob("*") if path.is_file()}
    assert {Fate.SAME} == set(put_all(tools, files()).values())
    after = {path: path.stat().st_mtime_ns for path in tools.root.rglob("*") if path.is_file()}
    manifest = tools.at(install.MANIFEST)
    assert {p: t for p, t in before.items() if p != manifest} == {p: t for p, t in after.items() if p != manifest}


def test_secrets_are_nobodys_business(tools):
    """The password is root's alone; the configuration isn't the world's."""
    old = os.umask(0)
    try:
        put_all(tools, files())
    finally:
        os.umask(old)

    assert 0o600 == stat.S_IMODE(tools.at(install.PASSWORD).stat().st_mode)
    assert 0o640 == stat.S_IMODE(tools.at(FILE).stat().st_mode)
    assert "secret-1\n" == tools.at(install.PASSWORD).read_text()
    assert "secret-1" not in tools.at(install.MANIFEST).read_text()


def test_a_made_up_password_is_long_and_made_once(tools):
    """Another run makes up another one, and keeps the first."""
    put_all(tools, files(password=None))
    first = tools.at(install.PASSWORD).read_text()

    assert Fate.KEPT is put_all(tools, files(password=None))[install.PASSWORD]
    assert first == tools.at(install.PASSWORD).read_text()
    assert len(first) > 24


def test_a_file_that_nobody_edited_is_brought_up_to_date(tools):
    """A newer version's unit replaces ours."""
    put_all(tools, files())
    newer = files(delay=600)

    assert Fate.UPDATED is put_all(tools, newer)[install.LOGIND]
    assert "InhibitDelayMaxSec=600" in tools.at(install.LOGIND).read_text()


def test_an_edited_file_is_kept_and_ours_goes_beside(tools):
    """The operator's word stands; ours is there to be compared."""
    put_all(tools, files())
    unit = tools.at("/etc/systemd/system/powerguard.service")
    unit.write_text("# mine\n")

    assert Fate.BESIDE is put_all(tools, files())["/etc/systemd/system/powerguard.service"]
    assert "# mine\n" == unit.read_text()
    assert "ExecStart=/opt/pg/bin/powerguard run" in unit.with_name("powerguard.service.new").read_text()


def test_what_was_there_before_us_is_kept(tools):
    """A polkit rule of the same name that we never wrote."""
    rule = tools.at("/etc/polkit-1/rules.d/50-powerguard.rules")
    rule.parent.mkdir(parents=True)
    rule.write_text("// theirs\n")

    assert Fate.BESIDE is put_all(tools, files())["/etc/polkit-1/rules.d/50-powerguard.rules"]
    assert "// theirs\n" == rule.read_text()


def test_taking_away_leaves_what_was_edited(tools):
    """Ours goes, theirs stays, and a second time there is nothing to do."""
    put_all(tools, files())
    tools.at("/etc/systemd/system/powerguard.service").write_text("# mine\n")
    installed = Installed(tools)
    fates = {path: installed.take(path) for path in install.paths(installed.digests)}
    installed.save()

    assert Fate.KEPT is fates.pop("/etc/systemd/system/powerguard.service")
    assert {Fate.REMOVED} == set(fates.values())
    left = [str(p.relative_to(tools.root)) for p in tools.root.rglob("*") if p.is_file()]
    assert ["etc/systemd/system/powerguard.service"] == left
    assert {} == Installed(tools).digests


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=300))
def test_any_manifest_is_no_reason_to_overwrite(tmp_path_factory, raw):
    """Lost or damaged, it means that nothing is known to be ours."""
    tools = Tools(root=tmp_path_factory.mktemp("root"))
    put_all(tools, files())
    tools.at(install.MANIFEST).write_bytes(raw)
    unit = tools.at("/etc/systemd/system/powerguard.service")
    unit.write_text("# mine\n")

    assert Fate.BESIDE is Installed(tools).fate(files()[4])


def test_a_folder_that_cant_be_written_is_one_error(tools):
    """No traceback for an operator who forgot sudo."""
    (tools.root / "etc").write_text("not a folder")

    with pytest.raises(PowerguardError, match="can't be") as caught:
        put_all(tools, files())
    assert caught.value.todo == "run it as root"


def test_a_command_that_is_needed_stops_it_and_others_are_said():
    """Which is which is the command's own business."""

    def fails(argv: Sequence[str]) -> str:
        raise ProgramFailed(f"{argv[0]} returned 1")

    tools = Tools(run=fails)
    with pytest.raises(PowerguardError, match="false returned 1"):
        install.do(tools, Command(("false",), ""))
    assert "false returned 1" == install.do(tools, Command(("false",), "", needed=False))


@pytest.mark.parametrize(("save_s", "delay_s"), [(None, 300), (40.0, 300), (300.0, 660), (301.0, 660), (1000.0, 2040)])
def test_logind_is_given_twice_the_flush(save_s, delay_s):
    """Whole minutes, five at least: it waits only as long as it must."""
    assert delay_s == install.delay_s(Policy(), save_s)


def test_a_program_where_the_service_cant_see_it_is_refused(monkeypatch, tmp_path):
    """A venv in somebody's home would fail at the next boot."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    (tmp_path / "powerguard").write_text("")

    with pytest.raises(UsageError, match="can't see") as caught:
        install.program()
    assert "/opt/powerguard" in caught.value.todo


# ---- the files as they ship ------------------------------------------------------------------------


def test_the_example_is_a_configuration_with_the_defaults_it_names():
    """Loaded as it is; and each commented line, uncommented, says the default."""
    text = (SYSTEMD / "powerguard.toml").read_text()
    config = loads(text, secrets=False)

    assert ("logind", "powerguard") == (config.halt.method, config.ups[0].user)
    bare = loads('[[ups]]\nname = "ups@localhost"\n', secrets=False)
    for table in ("policy", "log"):
        section = re.search(rf"(?ms)^\[{table}\]$(.*?)(?=^\[|\Z)", text)
        assert section is not None
        lines = re.findall(r"(?m)^# (\w+ = (?:\"[^\"]*\"|[\d.]+|true|false))", section[1])
        assert lines
        said = loads('[[ups]]\nname = "ups@localhost"\n' + f"[{table}]\n" + "\n".join(lines), secrets=False)
        assert getattr(bare, table) == getattr(said, table)


def test_every_key_of_the_configuration_is_in_the_example():
    """Nothing that an operator may set is hidden from them."""
    import msgspec

    from powerguard.config import HaltConfig, LogConfig, MetricsConfig, NodeConfig, NotifyConfig, ShedConfig, UpsConfig

    text = (SYSTEMD / "powerguard.toml").read_text()
    kinds = (HaltConfig, LogConfig, MetricsConfig, NodeConfig, NotifyConfig, ShedConfig, UpsConfig, Policy)
    internal = {"password_inline", "feeds", "flush_load", "time_scale", "outages"}
    names = {field.name for kind in kinds for field in msgspec.structs.fields(kind)} - internal

    assert [] == [name for name in sorted(names) if not re.search(rf"(?m)^(# )?{name} = ", text)]


hosts = st.sampled_from(["localhost", "nut.example", "10.0.0.5:1", "[fd00::5]", "[fd00::5]:13493"])
upses = st.dictionaries(
    st.builds("{}@{}".format, st.from_regex(r"[a-z][a-z0-9_-]{0,15}", fullmatch=True), hosts),
    st.text(st.characters(blacklist_categories=("C", "Z")), max_size=30),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(upses, st.sampled_from(["powerguard", "gpu-7", ""]), st.sampled_from(["logind", "upsmon-fsd", "dry-run"]))
def test_any_upses_make_a_configuration(found, user, method):
    """What is discovered is what is watched, whatever the UPSes are called and described as."""
    config = loads(units.configuration(found, user=user, method=method), secrets=False)

    assert [str(UpsAddress.parse(name)) for name in found] == [ups.name for ups in config.ups]
    assert {user} == {ups.user for ups in config.ups}
    assert method == config.halt.method


def test_units_run_the_program_that_is_installed():
    """No unit names a path that isn't there."""
    for file in files():
        if file.path.endswith(".service"):
            assert "/usr/bin/powerguard" not in file.content.decode()
            assert b"Exec" in file.content


def test_every_hardening_option_has_its_reason():
    """No setting of the service stands without a comment since the last blank line."""
    explained = False
    for line in (SYSTEMD / "powerguard.service").read_text().splitlines():
        explained = line.startswith("#") or (explained and bool(line) and not line.startswith("["))
        if "=" in line and not line.startswith(("#", "Description", "Documentation", "WantedBy")):
            assert explained, line
