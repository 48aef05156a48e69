"""The configuration file: everything wrong is said at once; anything else is a Config."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from powerguard.config import Config, Secret, describe_change, load, loads
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.errors import ConfigError

TODAY = date(2026, 3, 1)
SMALL = '[[ups]]\nname = "rack@nut.example"\n'


def problems_of(text: str, **env: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        loads(text, source="f.toml", env=env, today=TODAY)
    return caught.value.problems


def test_smallest_file_is_one_ups():
    """One line under `[[ups]]` is a whole configuration; all else has a default."""
    config = loads(SMALL, env={}, today=TODAY)

    assert (config.ups[0].ups, config.ups[0].host, config.ups[0].port) == ("rack", "nut.example", 3493)
    assert Policy(feeds=(FeedPolicy(name="rack@nut.example:3493"),)) == config.policy
    assert config.halt.method == "dry-run"
    assert config.metrics.listen == ""
    assert config.node.name


@pytest.mark.parametrize(
    ("name", "canonical", "host"),
    [
        ("rack", "rack@localhost:3493", "localhost"),
        ("rack@nut", "rack@nut:3493", "nut"),
        ("rack@nut:1", "rack@nut:1", "nut"),
        ("rack@[::1]:13493", "rack@[::1]:13493", "::1"),
        ("rack@[fe80::1%eth0]", "rack@[fe80::1%eth0]:3493", "fe80::1%eth0"),
    ],
)
def test_ups_names_are_canonical(name, canonical, host):
    """A feed has one name however it is written, IPv6 included."""
    ups = loads(f'[[ups]]\nname = "{name}"', env={}).ups[0]

    assert (canonical, host) == (ups.name, ups.host)


@pytest.mark.root
def test_a_file_that_this_user_may_not_read(tmp_path):
    """It is there: another name or another installation wouldn't help, another user would."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    path = tmp_path / "powerguard.toml"
    path.write_text(SMALL)
    path.chmod(0o600)
    os.seteuid(65534)
    try:
        with pytest.raises(ConfigError) as caught:
            load(path)
    finally:
        os.seteuid(0)

    assert f"{path}: can't be read by this user: Permission denied" == caught.value.message
    assert "sudo" in caught.value.todo
    assert "group" in caught.value.todo


ONE_PROBLEM = [
    ("", "ups: no UPS is named"),
    ("[ups]\nname='a'", "ups: must be a list of tables"),
    ("[[ups]]", "ups[0].name: missing"),
    ("[[ups]]\nname=''", "ups[0].name: '' isn't a UPS"),
    ("[[ups]]\nname=3", "ups[0].name: must be a text"),
    ("[[ups]]\nname='a b@c'", "ups[0].name: 'a b@c' isn't"),
    ("[[ups]]\nname='a@c:99999'", "ups[0].name: 'a@c:99999' isn't"),
    ('[[ups]]\nname="a\\nLIST UPS"', "ups[0].name: must be a text without line breaks"),
    ("[[ups]]\nname='a'\n[[ups]]\nname='A@localhost'", "ups[1].name: A@localhost:3493 is named twice"),
    (SMALL + "user='u'", "ups[0].user: has no password"),
    (SMALL + "password='p'", "ups[0].user: missing, with a password"),
    (SMALL + "user='u'\npassword='p'\npassword_file='/x'", "ups[0].password: given beside"),
    (SMALL + "user='u'\npassword_file='/nowhere/pw'", "ups[0].password_file: /nowhere/pw: No such file"),
    (SMALL + "user='u'\npassword_file='${CREDENTIALS_DIRECTORY}/pw'", "is set by systemd alone"),
    (SMALL + "user='u'\npassword_file='${HOME}/pw'", "${HOME} isn't expanded"),
    (SMALL + "user='u'\npassword_file='/dev/null'", "doesn't hold one line"),
    (SMALL + "user='u'\npassword='${SECRET}'", "ups[0].password: variables aren't expanded here"),
    ("[node]\nname='${HOST}'\n" + SMALL, "node.name: variables aren't expanded here"),
    (SMALL + "tls='required'", """ups[0].tls: 'required' isn't one of its values; write "require\""""),
    (SMALL + "tls_ca='/nowhere.pem'", "ups[0].tls_ca: /nowhere.pem can't be read"),
    (SMALL + "answer_max_s=0", "ups[0].answer_max_s: 0 is outside"),
    (SMALL + "battery_installed='yesterday'", "ups[0].battery_installed: 'yesterday' isn't a date"),
    (SMALL + "battery_installed=2027-01-01", "2027-01-01 is in the future"),
    (SMALL + "battery_installed=2020-01-01T00:00:00", "must be a date"),
    (SMALL + "chemistry='vlra'", 'write "vrla"'),
    (SMALL + "learned_phi=2", "learned_phi: 2 is outside"),
    (SMALL + "rated=[[50]]", "rated: must be a list of pairs"),
    (SMALL + "rated=[[50, 100], [100, 200]]", "rated: runtime must fall"),
    (SMALL + "rated=[[200, 100]]", "rated: a load outside"),
    (SMALL + "colour='red'", "ups[0].colour: unknown key; write one of name, user"),
    (SMALL + "[halt]\ndelay_shutdown='no'", "halt.delay_shutdown: must be true or false"),
    (SMALL + "[shed]\ngpu_power_pct=10", "shed.gpu_power_pct: 10: training would all but stop"),
    (SMALL + "[shed]\ngpu_power_pct=101", "shed.gpu_power_pct: 101 is outside its limits"),
    (SMALL + "[peers]\nlisten='9812'", "peers.listen: '9812' isn't an address with a port to 32767"),
    (SMALL + "[peers]\nlisten=':40000'", "peers.listen: ':40000' isn't an address with a port to 32767"),
    (SMALL + "[peers]\nkeys='keys'", "peers.keys: 'keys' isn't an absolute path"),
    (SMALL + "[node]\nname='a b'\n[peers]\nlisten=':9812'", "node.name: 'a b' can't be the name of a key"),
    (SMALL + "[shed]\nmethod='sudo'", "shed.method: 'sudo' isn't one of its values"),
    (SMALL + "[pollicy]", "f.toml:3: pollicy: unknown key, did you mean policy?"),
    (SMALL + "[policy]\n\nhalt_S=1", "f.toml:5: policy.halt_S: unknown key, did you mean halt_s?"),
    (SMALL + "[policy]\nfeeds=[]", "policy.feeds: unknown key"),
    (SMALL + "[policy]\nmin_supplies=1", "policy.min_supplies: unknown key"),
    (SMALL + "policy=3", "unknown key"),
    ("policy=3\n" + SMALL, "policy: must be a table"),
    (SMALL + "[policy]\nhalt_s=nan", "policy.halt_s: must be a finite number"),
    (SMALL + "[policy]\nhalt_s=inf", "policy.halt_s: must be a finite number"),
    (SMALL + "[policy]\nhalt_s=true", "policy.halt_s: must be a finite number"),
    (SMALL + "[policy]\nhalt_s=-1", "policy.halt_s: -1 is outside its limits; write 1 to 3600"),
    (SMALL + "[policy]\nhalt_s=1" + "0" * 400, "policy.halt_s: must be a finite number"),
    (SMALL + "[policy]\nlb_polls=2.5", "policy.lb_polls: must be a whole number"),
    (SMALL + "[policy]\nsnapshot='sometimes'", "policy.snapshot: 'sometimes' isn't one of its values; write \"auto\""),
    (SMALL + "[policy]\nblind_halt_s=60", "policy.blind_halt_s: 60: parked ranks"),
    (SMALL + "[policy]\nblind_save_s=5\nblind_halt_s=5", "policy.blind_save_s: 5: two lost polls"),
    (SMALL + "[policy]\nblind_halt_s=1", "policy.blind_halt_s: 1: one lost poll"),
    (SMALL + "[policy]\npoll_battery_s=6", "policy.poll_battery_s: 6: the UPS would be read less often"),
    (SMALL + "[policy]\nhold_max_s=3", "policy.hold_max_s: 3: ranks would stop waiting"),
    (SMALL + "[policy]\nhold_max_s=60", "policy.hold_max_s: 60: a rank left alone"),
    (SMALL + "[policy]\nexit_wait_s=30", "policy.exit_wait_s: 30: ranks have exit_wait_s"),
    (SMALL + "[policy]\nflush_default_s=500", "policy.flush_max_s: 600: a flush would be given up"),
    (SMALL + "[policy]\nsnapshot_again_s=5", "policy.snapshot_again_s: 5: a second snapshot"),
    (SMALL + "[policy]\nconfirm_s=30", "policy.snapshot_after_s: 10: a snapshot would be ordered"),
    (SMALL + "[node]\nmin_supplies=2", "node.min_supplies: 2, with 1 [[ups]]; write 1 to 1"),
    (SMALL + "[node]\nmin_supplies=0", "node.min_supplies: 0 is outside"),
    (SMALL + "[node]\nrun_dir='run'", "node.run_dir: 'run' isn't an absolute path"),
    (SMALL + f"[node]\nrun_dir='/{'r' * 120}'", "node.run_dir: too long for the path of a socket"),
    (SMALL + "[halt]\nmethod='command'", "halt.command: missing"),
    (SMALL + "[halt]\nmethod='logind'\ncommand=['/bin/true']", "halt.command: isn't used"),
    (SMALL + "[halt]\nmethod='command'\ncommand='poweroff'", "halt.command: must be a list of texts"),
    (SMALL + "[halt]\nmethod='command'\ncommand=['poweroff']", "'poweroff' isn't an absolute path"),
    (SMALL + "[notify]\ncommand=['wall']", "notify.command: 'wall' isn't an absolute path"),
    (SMALL + "[metrics]\nlisten='9811'", "metrics.listen: '9811' isn't an address"),
    (SMALL + "[metrics]\nlisten='::1:9811'", "metrics.listen: '::1:9811' isn't an address"),
    (SMALL + "[log]\nlevel='loud'", "log.level: 'loud' isn't"),
]


@pytest.mark.parametrize(("text", "wrong"), ONE_PROBLEM)
def test_each_problem_has_one_line(text, wrong):
    """One mistake is one line that names the file, the key, what is wrong and what to write."""
    problems = problems_of(text)

    assert len(problems) == 1, problems
    assert wrong in problems[0]
    assert problems[0].startswith("f.toml")
    assert "; write " in problems[0] or "did you mean" in problems[0]


def test_every_problem_is_reported_at_once_in_the_order_of_the_file():
    """Fifteen mistakes in one file are fifteen lines, sorted by line, none hidden by another."""
    text = """
[node]
min_suplies = 2
run_dir = "run"
[[ups]]
name = "a@b"
user = "x"
[[ups]]
name = "A@b:3493"
rated = [[50, 100], [100, 200]]
battery_installed = 2093-01-01
[policy]
halt_s = "x"
blind_halt_s = 60
margin_s = -3
hold_max_s = 1
on_battery = "rides"
[halt]
method = "comand"
[metrics]
listen = "everywhere"
[log]
format = "yaml"
[polic]
"""
    problems = problems_of(text)

    lines = [int(p.split(":")[1]) for p in problems]
    assert lines == [3, 4, 7, 9, 10, 11, 13, 14, 15, 16, 17, 19, 21, 23, 24]


def test_relations_say_nothing_about_a_key_that_is_already_wrong():
    """A mistyped halt_s isn't also blamed for the relations that it takes part in."""
    assert len(problems_of(SMALL + "[policy]\nhalt_s = 'x'\nhold_max_s = 500")) == 1


def test_defaults_hold_their_own_relations():
    """The Policy of the core is a lawful configuration as it stands."""
    assert Policy().halt_s == loads(SMALL, env={}).policy.halt_s


def test_every_field_of_the_policy_is_a_key():
    """What `decide` weighs can be written in `[policy]`: a new field needs no line here."""
    others = ("feeds", "min_supplies", "outages")
    values = {f.name: f.default for f in msgspec.structs.fields(Policy) if f.name not in others}
    text = "\n".join(f"{k} = {str(v).lower() if not isinstance(v, str) else repr(v)}" for k, v in values.items())

    assert loads(f"{SMALL}[policy]\n{text}", env={}).policy == loads(SMALL, env={}).policy


def test_credentials_are_read_and_never_shown(tmp_path):
    """A password comes from systemd's credential directory, and no repr or message holds it."""
    (tmp_path / "nut").write_text("s3cr3t word\n")
    text = SMALL + "user = 'mon'\npassword_file = '${CREDENTIALS_DIRECTORY}/nut'"
    config = loads(text, env={"CREDENTIALS_DIRECTORY": str(tmp_path)})
    other = loads(SMALL + "user = 'mon'\npassword = 'other'", env={})

    assert config.ups[0].password.reveal() == "s3cr3t word"
    assert (config.ups[0].password_inline, other.ups[0].password_inline) == (False, True)
    assert "s3cr3t" not in repr(config) + str(config.ups)
    assert [line for line in describe_change(config, other) if "password:" in line] == [
        "ups rack@nut.example:3493.password: changed"
    ]
    assert "s3cr3t" not in "".join(describe_change(config, other))


def test_a_policy_can_be_weighed_without_its_secrets():
    """A configuration made for another machine loads where its password and certificate aren't."""
    text = (
        SMALL
        + "user = 'mon'\npassword_file = '${CREDENTIALS_DIRECTORY}/nut'\ntls_ca = '/nowhere'\n[policy]\nmargin_s = 3"
    )

    assert loads(text, env={}, secrets=False).policy.margin_s == 3


def test_battery_age_comes_from_its_date():
    """The day the battery was put in, as a date, a text or a month, becomes an age in years."""
    for written in ("2023-03-01", '"2023-03-01"', '"2023-03"'):
        feed = loads(f"{SMALL}battery_installed = {written}", env={}, today=TODAY).policy.feeds[0]
        assert (feed.battery_installed, feed.age_y) == ("2023-03-01", 3.0)


def test_change_is_described_key_by_key():
    """After a reload the log says which values differ, with old and new, and nothing else."""
    old = loads(SMALL + "[policy]\nmargin_s = 10\n[halt]\nmethod='dry-run'", env={})
    new = loads(
        "[[ups]]\nname='rack@nut.example'\nchemistry='lfp'\n[[ups]]\nname='b'\n"
        "[policy]\nmargin_s = 20\n[halt]\nmethod='logind'",
        env={},
    )

    assert describe_change(old, new) == [
        "halt.method: dry-run -> logind",
        "policy.margin_s: 10.0 -> 20.0",
        "ups b@localhost:3493: added",
        "ups rack@nut.example:3493.chemistry: unset -> lfp",
    ]
    assert describe_change(old, old) == []
    assert "ups b@localhost:3493: removed" in describe_change(new, old)


def test_files_that_cannot_be_read_are_one_line(tmp_path):
    """Absent, a directory, not UTF-8, not TOML, endless: each a ConfigError that names the file."""
    binary, broken, huge = tmp_path / "b.toml", tmp_path / "t.toml", tmp_path / "h.toml"
    binary.write_bytes(b"name = '\xff'")
    broken.write_text("[node\n")
    huge.write_text("#" * (2 << 20))
    for path in (tmp_path / "absent.toml", tmp_path, binary, broken, huge, Path("/nul\0")):
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert str(path) in caught.value.message
        assert len(str(caught.value).splitlines()) == 1


KEYS = st.sampled_from(
    [
        "node",
        "ups",
        "policy",
        "halt",
        "metrics",
        "log",
        "notify",
        "name",
        "user",
        "password",
        "password_file",
        "tls",
        "rated",
        "battery_installed",
        "run_dir",
        "min_supplies",
        "halt_s",
        "lb_polls",
        "on_battery",
        "command",
        "method",
        "listen",
        "level",
        "x",
    ]
)
SCALARS = st.one_of(
    st.integers(-(10**30), 10**30).map(str),
    st.floats().map(lambda f: repr(f).replace("inf", "inf")),
    st.booleans().map(lambda b: str(b).lower()),
    st.text(st.characters(blacklist_characters="'\"\\", min_codepoint=32, blacklist_categories=("Cs", "Cc"))).map(
        lambda s: f"'{s}'"
    ),
    st.sampled_from(["2020-01-01", "12:00:00", "2020-01-01T00:00:00Z", "'${CREDENTIALS_DIRECTORY}/x'", '"\\n"', "{}"]),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3).map(lambda v: f"[{', '.join(v)}]"), max_leaves=6
)
LINES = st.one_of(
    st.tuples(KEYS, VALUES).map(" = ".join),
    KEYS.map("[{}]".format),
    KEYS.map("[[{}]]".format),
)
TOML = st.lists(LINES, max_size=12).map("\n".join)


@given(st.one_of(TOML, st.text()))
@example("x = " + "[" * 3000)
@example("x = " + "9" * 5000)
@example(SMALL + "[policy]\nhalt_s = -0.0")
def test_any_text_is_a_config_or_a_config_error(text):
    """Whatever the file holds, the answer is a Config or a ConfigError, and nothing else."""
    try:
        config = loads(text, env={}, today=TODAY)
    except ConfigError:
        return
    assert isinstance(config, Config)
    assert len(config.ups) == len(config.policy.feeds) >= 1


def test_secret_hides_itself():
    """A password's repr, str and formatting hold none of it; equality works without showing it."""
    secret = Secret("open sesame")

    assert "sesame" not in f"{secret!r}{secret}{[secret]}"
    assert Secret("open sesame") == secret
    assert secret != "open sesame"
    assert not Secret()
