"""What a UPS says, and what is believed of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.core.status import parse
from powerguard.core.types import Comm, Reading, Sample


def read(status: str | None = "OL", comm: Comm = Comm.OK, **variables: str) -> Reading:
    """The reading of a poll; `battery_charge="90"` stands for battery.charge."""
    named = {name.replace("_", "."): value for name, value in variables.items()}
    if status is not None:
        named["ups.status"] = status
    return parse(Sample(feed="u@h", at=5.0, comm=comm, variables=named))


@pytest.mark.parametrize(
    ("status", "on_battery", "flags"),
    [
        ("OL", False, set()),
        ("OB", True, set()),
        ("OB DISCHRG", True, set()),
        ("DISCHRG OB", True, set()),
        ("OL CHRG", False, set()),
        ("OL CHRG LB", False, {"low_battery"}),
        ("OL LB OVER RB BOOST", False, {"low_battery", "overload", "replace_battery"}),
        ("ALARM OL LB RB", False, {"low_battery", "replace_battery"}),
        ("OB LB", True, {"low_battery"}),
        ("OB LB CAL", True, {"low_battery", "testing"}),
        ("OB CAL", True, {"testing"}),
        ("OL TEST", False, {"testing"}),
        ("OL DISCHRG", False, set()),
        ("OL DISCHRG OB", True, set()),
        ("OL OB", True, set()),
        ("OL OFF", False, {"off"}),
        ("OL CHRG OFF", False, {"off"}),
        ("OFF", None, {"off"}),
        ("TRIM", None, set()),
        ("ALARM ", None, set()),
        ("BOOST BYPASS", None, {"bypass"}),
        ("OL BYPASS", False, {"bypass"}),
        ("FSD OL", False, {"fsd"}),
        ("ALARM OL FSD", False, {"fsd"}),
        ("FSD OB LB", True, {"fsd", "low_battery"}),
        ("OL TRIM", False, set()),
        ("OL HB", False, set()),
        ("OL ECO", False, set()),
        ("ol chrg", False, set()),
        ("Ob Lb", True, {"low_battery"}),
        ("  OB   LB  ", True, {"low_battery"}),
        ("OB OB LB LB", True, {"low_battery"}),
        ("OLD OBLB", None, set()),
        ("(null)", None, set()),
        ("OL charged (null) \udcff", False, set()),
        ("", None, set()),
        ("   ", None, set()),
        (None, None, set()),
    ],
)
def test_tokens(status: str | None, on_battery: bool | None, flags: set[str]):
    """The status is a set of words; OB wins, neither OL nor OB is unknown, LB needs its own word."""
    reading = read(status)
    names = ("low_battery", "fsd", "testing", "off", "bypass", "overload", "replace_battery")

    assert on_battery is reading.on_battery
    assert flags == {name for name in names if getattr(reading, name)}
    assert Comm.OK is reading.comm
    assert frozenset((status or "").upper().split()) == reading.tokens


def test_unknown_status_is_explained():
    """A status that says neither OL nor OB, and none at all, leave a note for people."""
    assert read("TRIM").notes == ("ups.status 'TRIM' says neither OL nor OB",)
    assert "missing or empty" in read(None).notes[0]
    assert read("OL").notes == ()


@pytest.mark.parametrize("status", ["WAIT", "wait", "OB LB WAIT", "FSD WAIT", "WAIT OL"])
def test_wait_infers_nothing(status: str):
    """While upsd waits for the driver nothing is believed, neither words nor numbers."""
    reading = read(status, battery_charge="3", battery_runtime="1", ups_alarm="Shutdown imminent!")

    assert Comm.WAIT is reading.comm
    assert reading == Reading("u@h", 5.0, Comm.WAIT, frozenset(status.upper().split()))


@pytest.mark.parametrize("comm", [comm for comm in Comm if comm is not Comm.OK])
def test_no_answer_infers_nothing(comm: Comm):
    """Variables that came with an error are not believed."""
    assert Reading("u@h", 5.0, comm) == read("OB LB", comm, battery_charge="3")


@pytest.mark.parametrize(
    ("status", "text", "charge", "expected"),
    [
        ("OB", "600", "90", 600.0),
        ("OB", "600.5", "90", 600.5),
        ("OB", " 600 ", "90", 600.0),
        ("OB", "86399", "90", 86399.0),
        ("OB", "86400", "90", None),
        ("OB", "133200", "90", None),
        ("OL", "65535", "100", None),
        ("OL", "65535.0", "100", None),
        ("OB", "599940", "90", None),
        ("OB", "3932100", "90", None),
        ("OB", "-1", "100", None),
        ("OB", "-60", "100", None),
        ("OL", "0", "100", None),
        ("OL", "0", "5", None),
        ("OB", "0", "24", None),
        ("OB", "0", None, None),
        ("OB", "0", "10", 0.0),
        ("OB LB", "0", "0", 0.0),
        ("TRIM", "0", "0", None),
        ("OB", "36:00", "90", None),
        ("OB", "1:57", "90", None),
        ("OB", "0:36:00", "90", None),
        ("OB", "", "90", None),
        ("OB", "n/a", "90", None),
        ("OB", "nan", "90", None),
        ("OB", "inf", "90", None),
        ("OB", "1_000", "90", None),
        ("OB", "1,5", "90", None),
        ("OB", "٣٠٠", "90", None),
        ("OB", "600 s", "90", None),
        ("OB", "2.3e254", "90", None),
        ("OB", "1e999", "90", None),
        ("OB", "0x10", "90", None),
    ],
)
def test_runtime(status: str, text: str, charge: str | None, expected: float | None):
    """Sentinels, zero on mains, negatives and clock times are unknown; what is dropped is noted unless empty."""
    extra = {} if charge is None else {"battery_charge": charge}
    reading = read(status, battery_runtime=text, **extra)

    assert expected == reading.runtime_s
    assert (expected is None and text != "") == any("battery.runtime" in note for note in reading.notes)


@pytest.mark.parametrize(
    ("variable", "field", "text", "expected"),
    [
        ("battery.charge", "charge_pct", "0", 0.0),
        ("battery.charge", "charge_pct", "100", 100.0),
        ("battery.charge", "charge_pct", "102.3", 100.0),
        ("battery.charge", "charge_pct", "110", 100.0),
        ("battery.charge", "charge_pct", "120", None),
        ("battery.charge", "charge_pct", "255", None),
        ("battery.charge", "charge_pct", "1000", None),
        ("battery.charge", "charge_pct", "-143.2", None),
        ("battery.charge.low", "charge_low_pct", "20", 20.0),
        ("battery.charge.low", "charge_low_pct", "50", 50.0),
        ("battery.charge.low", "charge_low_pct", "89", None),
        ("battery.charge.low", "charge_low_pct", "100", None),
        ("battery.charge.low", "charge_low_pct", "345.6", None),
        ("battery.runtime.low", "runtime_low_s", "120", 120.0),
        ("battery.runtime.low", "runtime_low_s", "59940", None),
        ("ups.load", "load_pct", "0", 0.0),
        ("ups.load", "load_pct", "125", 125.0),
        ("ups.load", "load_pct", "255", None),
        ("ups.load", "load_pct", "520", None),
        ("ups.load", "load_pct", "2.3e254", None),
        ("input.voltage", "input_voltage", "242.0", 242.0),
        ("input.voltage", "input_voltage", "0.0", 0.0),
        ("input.voltage", "input_voltage", "-159357104", None),
        ("input.voltage", "input_voltage", "-6437", None),
        ("battery.temperature", "temperature_c", "-5", -5.0),
        ("battery.temperature", "temperature_c", "298.15", None),
        ("ups.temperature", "temperature_c", "31", 31.0),
        ("driver.parameter.pollfreq", "pollfreq_s", "30", 30.0),
        ("driver.parameter.pollfreq", "pollfreq_s", "0", None),
        ("driver.parameter.pollinterval", "pollinterval_s", "2", 2.0),
    ],
)
def test_ranges(variable: str, field: str, text: str, expected: float | None):
    """Each number is believed within its range only, and its absence is never zero."""
    believed = parse(Sample("u@h", 0.0, Comm.OK, {"ups.status": "OB", variable: text}))
    absent = parse(Sample("u@h", 0.0, Comm.OK, {"ups.status": "OB"}))

    assert expected == getattr(believed, field)
    assert getattr(absent, field) is None
    assert (expected is None) == (believed.notes != ())


@pytest.mark.parametrize(
    ("voltage", "nominal", "expected"),
    [
        ("27.3", "24", 27.3),
        ("10.5", "12", 10.5),
        ("54.6", "48", 54.6),
        ("14.6", "12.8", 14.6),
        ("2.28", "24", None),
        ("2.2", "12", None),
        ("54", "12", None),
        ("8.3", "12", None),
        ("15.1", "12", None),
        ("13.1", None, 13.1),
        ("13.1", "0", 13.1),
        ("0", "12", None),
        ("99999", None, None),
    ],
)
def test_voltage(voltage: str, nominal: str | None, expected: float | None):
    """A battery voltage out of 0.7..1.25 of nominal is a cell or another bank; with no nominal it stands alone."""
    extra = {} if nominal is None else {"battery_voltage_nominal": nominal}

    assert expected == read("OB", battery_voltage=voltage, **extra).voltage


@pytest.mark.parametrize(
    ("status", "charge", "input_voltage", "expected"),
    [
        ("OL DISCHRG", "100", "0", False),
        ("OL DISCHRG", "97", "230", False),
        ("OL DISCHRG", "97", "3.4", True),
        ("OL DISCHRG", "97", None, False),
        ("OL DISCHRG", None, "0", False),
        ("OL", "97", "0", False),
        ("OL CHRG", "97", "0", False),
    ],
)
def test_on_line_that_contradicts_itself(status: str, charge: str | None, input_voltage: str | None, expected: bool):
    """OL is overruled only by three witnesses together: DISCHRG, a dead input, a battery below full."""
    extra = {} if charge is None else {"battery_charge": charge}
    extra |= {} if input_voltage is None else {"input_voltage": input_voltage}

    assert expected is read(status, **extra).on_battery


def test_alarms_are_claims():
    """`ups.alarm` can say LB, RB and "no autonomy" in words."""
    assert read("OB ALARM", ups_alarm="Shutdown imminent!").low_battery
    assert read("OL ALARM", ups_alarm="Replace battery! No battery installed!").replace_battery
    assert read("OL ALARM", ups_alarm="Replace battery! No battery installed!").bypass
    assert not read("OB ALARM", ups_alarm="Temperature too high").low_battery


@pytest.mark.parametrize("result", [
    "Done and error", "done and warning", "Failed", "FAIL", "10s test failed", "Battery Bad (Replace)", "Bad Inverter",
    "Bad battery pack: replace", "Change Battery", "UPS Internal Failure", "NG", "BT",
])  # fmt: skip
def test_a_self_test_that_went_wrong_is_a_doubt(result: str):
    """In every driver's words; the doubt quotes them."""
    assert read("OL", ups_test_result=result).doubt == f"calls its last self-test {result!r}"


@pytest.mark.parametrize("result", [
    "", "Done and passed", "done and passed", "No test initiated", "NO", "Ok", "OK", "In progress", "Aborted", "0",
    "Unknown", "InvalidTest", "Passed, Source: Internal", "No test performed", "Test scheduled", "Idle", "\udcff",
    "Battery charge: 20%", "Normal", "Refused", "not yet done...",
])  # fmt: skip
def test_a_self_test_that_says_nothing_is_none(result: str):
    """Passed, none yet, or not carried out: nothing is known against the battery."""
    assert read("OL", ups_test_result=result).doubt == ""


def test_a_doubt_is_short():
    """Whatever a UPS says, what is quoted is bounded; RB says it first."""
    assert len(read("OL", ups_test_result="Failed " * 1000).test_failed) == 40
    assert read("OL RB", ups_test_result="Failed").doubt == "asks for a new battery (RB)"


# Dumps as users posted them (the tracker and number are in each name).
DUMPS: dict[str, tuple[dict[str, str], dict[str, object]]] = {
    "nut#1740 Smart-UPS 2200": (
        {"ups.status": "OL", "battery.runtime": "65535", "input.voltage": "0.0", "ups.load": "5.2"},
        {"on_battery": False, "runtime_s": None, "input_voltage": 0.0, "load_pct": 5.2},
    ),
    "nut#983 Smart-UPS 750": (
        {"ups.status": "OL", "battery.charge": "100", "battery.runtime": "-1"},
        {"on_battery": False, "runtime_s": None, "charge_pct": 100.0},
    ),
    "nut#1068 Back-UPS XS 950U": (
        {
            "ups.status": "ALARM OL CHRG LB",
            "ups.alarm": "Shutdown imminent!",
            "battery.charge": "0",
            "battery.runtime": "0",
            "battery.voltage": "12.3",
            "battery.voltage.nominal": "12.0",
            "ups.load": "17",
        },
        {"on_battery": False, "low_battery": True, "runtime_s": None, "charge_pct": 0.0, "voltage": 12.3},
    ),
    "nut#731 Dell Rack 2700W": (
        {"ups.status": "OL", "battery.runtime": "65535", "battery.runtime.low": "120", "ups.load": "7"},
        {"runtime_s": None, "runtime_low_s": 120.0, "load_pct": 7.0},
    ),
    "nut#3346 LB although it runs": (
        {"ups.status": "OB DISCHRG LB", "battery.charge": "95", "battery.runtime": "1600"},
        {"on_battery": True, "low_battery": True, "runtime_s": 1600.0},
    ),
    "home-assistant#182408": (
        {"ups.status": "OL charged", "battery.charger.status": "(null)", "battery.charge.restart": "160"},
        {"on_battery": False, "charge_pct": None, "runtime_s": None, "tokens": frozenset({"OL", "CHARGED"})},
    ),
    "DRuggeri#54 Santak TG-BOX 850": (
        {"ups.status": "OL", "battery.charge": "100", "battery.runtime": "1104", "ups.load": "27"},
        {"charge_pct": 100.0, "runtime_s": 1104.0, "load_pct": 27.0, "voltage": None},
    ),
    "ph4upsmon, values of the mains after the transfer": (
        {
            "ups.status": "OB DISCHRG",
            "input.voltage": "242",
            "ups.load": "0",
            "battery.runtime": "13370",
            "battery.charge": "100",
            "battery.voltage": "26.8",
        },
        {"on_battery": True, "input_voltage": 242.0, "runtime_s": 13370.0, "testing": False},
    ),
}


@pytest.mark.parametrize("name", DUMPS)
def test_public_dumps(name: str):
    """Dumps of real devices are read as their owners knew them to be."""
    variables, expected = DUMPS[name]
    reading = parse(Sample("u@h", 0.0, Comm.OK, variables))

    assert expected == {field: getattr(reading, field) for field in expected}


NAMES = st.sampled_from(
    [
        "ups.status",
        "ups.alarm",
        "ups.load",
        "battery.charge",
        "battery.charge.low",
        "battery.runtime",
        "battery.runtime.low",
        "battery.voltage",
        "battery.voltage.nominal",
        "battery.temperature",
        "battery.type",
        "input.voltage",
        "input.voltage.nominal",
        "driver.parameter.pollfreq",
    ]
)
WORDS = st.sampled_from(
    [
        "OL",
        "OB",
        "LB",
        "HB",
        "RB",
        "CHRG",
        "DISCHRG",
        "BYPASS",
        "CAL",
        "OFF",
        "OVER",
        "TRIM",
        "BOOST",
        "FSD",
        "ALARM",
        "TEST",
        "ECO",
        "OTHER",
    ]
)
STATUS = st.lists(WORDS | st.text(min_size=1, max_size=6), max_size=6).map(" ".join)
NUMBERS = st.floats().map(str) | st.integers().map(str) | st.sampled_from(["36:00", "65535", "(null)", "-1", "0"])


@given(st.dictionaries(NAMES | st.text(max_size=12), STATUS | NUMBERS | st.text(max_size=30)))
def test_anything_gives_a_reading(variables: dict[str, str]):
    """No dictionary of strings raises, and every number that comes out is finite and within its range."""
    reading = parse(Sample("u@h", 0.0, Comm.OK, variables))
    bounds = {
        "charge_pct": (0, 100),
        "charge_low_pct": (0, 50),
        "runtime_s": (0, 86400),
        "runtime_low_s": (0, 3600),
        "load_pct": (0, 200),
        "voltage": (1, 1000),
        "voltage_nominal": (1, 1000),
        "input_voltage": (0, 700),
        "temperature_c": (-40, 100),
        "pollfreq_s": (0, 3600),
    }

    for field, (low, high) in bounds.items():
        value = getattr(reading, field)
        assert value is None or (math.isfinite(value) and low <= value <= high)
    assert all(len(note) < 200 for note in reading.notes)


@given(st.dictionaries(NAMES, NUMBERS), STATUS, st.randoms(use_true_random=False))
def test_order_and_case_never_matter(variables: dict[str, str], status: str, rng):
    """Shuffling the words, repeating them and changing their case changes nothing."""
    words = status.split()
    shuffled = words + words[:1]
    rng.shuffle(shuffled)
    changed = "  ".join(rng.choice([str.upper, str.lower])(word) if word.isascii() else word for word in shuffled)

    one = parse(Sample("u@h", 0.0, Comm.OK, variables | {"ups.status": status}))
    other = parse(Sample("u@h", 0.0, Comm.OK, variables | {"ups.status": changed}))

    assert one == other


@given(st.dictionaries(NAMES, NUMBERS), NAMES)
def test_taking_a_variable_away_never_invents_a_number(variables: dict[str, str], name: str):
    """With a variable missing its field is None, whatever else is there."""
    fields = {
        "battery.charge": "charge_pct",
        "battery.charge.low": "charge_low_pct",
        "battery.runtime": "runtime_s",
        "battery.runtime.low": "runtime_low_s",
        "ups.load": "load_pct",
        "battery.voltage": "voltage",
        "battery.voltage.nominal": "voltage_nominal",
        "input.voltage": "input_voltage",
    }
    without = {key: value for key, value in variables.items() if key != name}
    reading = parse(Sample("u@h", 0.0, Comm.OK, without | {"ups.status": "OB"}))

    if name in fields:
        assert getattr(reading, fields[name]) is None
