"""Outlet drivers against peers that speak the real protocols: HTTP plugs, an SNMP agent, a real upsd."""

from __future__ import annotations

import io
import shutil

import pytest

from hil.outlets import Human, Nut, OutletFailed, Pdu, Shelly, Tasmota
from hil.virtual import snmp
from powerguard.errors import ConfigError
from powerguard.sim.nut import RealNut, missing
from tests.hil.plug import Plug

PLUGS = [
    pytest.param("shelly1", lambda **how: Shelly(name="wall", feeds="the UPS", generation=1, **how), 1, id="shelly1"),
    pytest.param("shelly2", lambda **how: Shelly(name="wall", feeds="the UPS", **how), 1, id="shelly2"),
    pytest.param("tasmota", lambda **how: Tasmota(name="wall", feeds="the UPS", **how), 2, id="tasmota"),
]


@pytest.fixture
def password_file(tmp_path) -> str:
    """A file with a password that URLs and quotes must not break."""
    path = tmp_path / "password"
    path.write_text('se cret&"#%\n')
    return str(path)


# ---- plugs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("api", "make", "second"), PLUGS)
def test_a_plug_switches_its_own_relay_alone(api, make, second):
    """Off and on again, confirmed by its state; the other relay stays."""
    with Plug(api) as plug:
        outlet = make(url=plug.url, channel=second)
        outlet.switch(False)
        assert [True, False] == plug.relays
        outlet.switch(True)
        assert [True, True] == plug.relays


@pytest.mark.parametrize(("api", "make", "second"), PLUGS)
def test_a_plug_with_a_password(api, make, second, password_file):
    """Given as each asks for it: Basic, Digest with SHA-256, in the query; without it nothing is switched."""
    with Plug(api, password='se cret&"#%', relays=1) as plug:
        first = second - 1
        with pytest.raises(OutletFailed):
            make(url=plug.url, channel=first).switch(False)
        assert [True] == plug.relays
        make(url=plug.url, channel=first, password_file=password_file).switch(False)
        assert [False] == plug.relays


@pytest.mark.parametrize(("api", "make", "second"), PLUGS)
def test_a_stuck_relay_is_told(api, make, second):
    """The plug says OK and does nothing: that is a failure, with what to do."""
    with Plug(api) as plug:
        plug.stuck = True
        with pytest.raises(OutletFailed, match="was told to go off and says that it is on; switch it by hand"):
            make(url=plug.url, channel=second, settle_s=0.1).switch(False)


@pytest.mark.parametrize(("api", "make", "second"), PLUGS)
def test_a_relay_that_isnt_there(api, make, second):
    """Neither the other relay nor a silent success."""
    with Plug(api) as plug:
        with pytest.raises(OutletFailed, match="wall"):
            make(url=plug.url, channel=7).switch(False)
        assert [True, True] == plug.relays


@pytest.mark.parametrize(("api", "make", "second"), PLUGS)
def test_a_plug_that_is_gone(api, make, second):
    """Nobody there: said, with the address."""
    with Plug(api) as plug:
        url = plug.url
    with pytest.raises(OutletFailed, match="refused"):
        make(url=url, channel=second).switch(False)


# ---- a person --------------------------------------------------------------------------------------


def test_a_person_types_the_outlets_name(monkeypatch, capsys):
    """Not a stray Enter."""
    plug = Human(name="plug", feeds="the UPS")
    monkeypatch.setattr("sys.stdin", io.StringIO("plug\n\n"))
    plug.switch(False)
    assert "Pull the plug of plug (the UPS) now" in capsys.readouterr().out
    with pytest.raises(OutletFailed, match="'' was typed"):
        plug.switch(True)


def test_a_secret_that_cant_be_read(tmp_path):
    """A wrong path is the configuration's fault, and says so."""
    with pytest.raises(ConfigError, match="can't be read"):
        Shelly(name="wall", feeds="x", url="http://127.0.0.1:1", password_file=str(tmp_path / "none")).switch(True)


# ---- SNMP ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agent():
    """A switched PDU with four outlets that can be set, and APC's UPS beside it."""
    if why := snmp.missing():
        pytest.skip(why)
    if shutil.which("snmpset") is None:
        pytest.skip("snmpset isn't installed (apt-get install snmp)")
    outlets = [snmp.writable(f"{outlet_oid()}.{number}", 1) for number in (1, 2, 3, 4)]
    with snmp.Agent([*snmp.powernet(), *outlets]) as running:
        yield running


def outlet_oid() -> str:
    from hil.outlets.snmp import APC_OUTLET

    return APC_OUTLET


@pytest.fixture
def community(tmp_path) -> str:
    """A file with the agent's community."""
    path = tmp_path / "community"
    path.write_text("public\n")
    return str(path)


@pytest.mark.slow
def test_an_outlet_of_a_pdu(agent, community):
    """Set and read back through net-snmp; its neighbours stay on."""
    third = Pdu(name="pdu-3", feeds="the UPS", host=f"127.0.0.1:{agent.port}", outlet=3, community_file=community)
    fourth = Pdu(name="pdu-4", feeds="the UPS", host=f"127.0.0.1:{agent.port}", outlet=4, community_file=community)
    third.switch(False)
    assert (False, True) == (third._is_on(), fourth._is_on())
    third.switch(True)
    assert third._is_on()


@pytest.mark.slow
def test_an_outlet_that_the_pdu_doesnt_have(agent, community):
    """SNMP's own word for it."""
    ninth = Pdu(name="pdu-9", feeds="the UPS", host=f"127.0.0.1:{agent.port}", outlet=9, community_file=community)
    with pytest.raises(OutletFailed, match="pdu-9: "):
        ninth.switch(False)


@pytest.mark.slow
def test_a_pdu_that_doesnt_answer(agent, tmp_path):
    """A wrong community is met with silence: a failure, within its retries."""
    (tmp_path / "wrong").write_text("secret\n")
    third = Pdu(
        name="pdu-3",
        feeds="the UPS",
        host=f"127.0.0.1:{agent.port}",
        outlet=3,
        community_file=str(tmp_path / "wrong"),
    )
    with pytest.raises(OutletFailed, match="Timeout"):
        third.switch(False)


# ---- NUT -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nut():
    """A real upsd with a dummy-ups, which lists `load.off` and can't do it."""
    if why := missing("upsd", "dummy-ups"):
        pytest.skip(why)
    with RealNut({"demo": {"ups.status": "OL", "outlet.1.status": "on"}}) as running:
        yield running


def outlet_of(nut, tmp_path, **how) -> Nut:
    (tmp_path / "nut").write_text("adminpw\n")
    return Nut(
        name="group-1",
        feeds="the node",
        ups=nut.address("demo"),
        user="admin",
        password_file=str(tmp_path / "nut"),
        **how,
    )


@pytest.mark.nut
@pytest.mark.slow
def test_upsds_ok_isnt_believed(nut, tmp_path):
    """Its driver doesn't know the command though upsd says OK: the tracking tells, and so do we."""
    with pytest.raises(OutletFailed, match=r"group-1: (unknown|failed|invalid)"):
        outlet_of(nut, tmp_path).switch(False)


@pytest.mark.nut
@pytest.mark.slow
def test_a_command_that_the_ups_doesnt_have(nut, tmp_path):
    """Refused by upsd itself."""
    with pytest.raises(OutletFailed, match="cmd not supported"):
        outlet_of(nut, tmp_path, off="outlet.7.load.off").switch(False)


@pytest.mark.nut
@pytest.mark.slow
def test_a_user_who_may_not(nut, tmp_path):
    """Access is denied, nothing is switched."""
    (tmp_path / "nut").write_text("secondarypw\n")
    outlet = Nut(
        name="group-1",
        feeds="the node",
        ups=nut.address("demo"),
        user="secondary",
        password_file=str(tmp_path / "nut"),
    )
    with pytest.raises(OutletFailed, match="access denied"):
        outlet.switch(False)


@pytest.mark.nut
@pytest.mark.slow
def test_the_load_of_an_snmp_ups(agent, tmp_path):
    """INSTCMD load.off through a real upsd and snmp-ups arrives in the card as a SET of upsAdvControlUpsOff."""
    control = "1.3.6.1.4.1.318.1.1.1.6.2.1.0"
    agent.show([*snmp.powernet(), snmp.writable(control, 1)])
    with RealNut({"demo": snmp.driver(agent, "apcc")}) as nut:
        outlet_of(nut, tmp_path).switch(False)
        card = Pdu(
            name="card",
            feeds="the node",
            host=f"127.0.0.1:{agent.port}",
            outlet=0,
            oid=control.removesuffix(".0"),
            community_file=str(community_of(tmp_path)),
        )
        assert "2" == card._call("snmpget")


def community_of(tmp_path):
    (tmp_path / "community").write_text("public\n")
    return tmp_path / "community"
