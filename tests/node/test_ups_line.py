"""The text of the NUT protocol: what is written is read back, and nothing else is read at all."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.errors import ConfigError
from powerguard.node.ups_line import MalformedLine, UpsAddress, decode, encode, printable, quote, words

WORD = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=30)


@given(st.lists(WORD, max_size=6), st.sampled_from([" ", "  ", "\t"]))
def test_what_is_quoted_is_read_back(sent, gap):
    """Any words survive quoting and reading, quotes and backslashes among them."""
    assert words(gap.join(quote(word) for word in sent)) == sent


@given(WORD)
def test_every_word_may_be_in_quotes(word):
    """upsd quotes values that need no quotes."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    assert words(f'VAR u v "{escaped}"') == ["VAR", "u", "v", word]


@given(st.text())
def test_any_text_is_words_or_malformed(line):
    """Reading gives words or MalformedLine, nothing else."""
    try:
        read = words(line)
    except MalformedLine:
        return
    assert all(isinstance(word, str) for word in read)


@given(WORD, st.integers(min_value=0))
def test_a_quoted_word_that_was_cut_is_no_word(word, at):
    """A line that ends inside a quoted word is malformed: half a status is not a status."""
    line = '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
    with pytest.raises(MalformedLine):
        words("VAR u v " + line[: 1 + at % (len(line) - 1)])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (r'VAR u ups.mfr "A\"BC"', ["VAR", "u", "ups.mfr", 'A"BC']),
        (r'VAR u ups.mfr "a \\ b"', ["VAR", "u", "ups.mfr", r"a \ b"]),
        (r'VAR u ups.id "no\#1"', ["VAR", "u", "ups.id", "no#1"]),
        ('VAR u ups.mfr ""', ["VAR", "u", "ups.mfr", ""]),
        ('VAR u ups.mfr "  padded  "', ["VAR", "u", "ups.mfr", "  padded  "]),
        ("NUMLOGINS u 1  ", ["NUMLOGINS", "u", "1"]),
        ("", []),
    ],
)
def test_lines_of_real_servers(line, expected):
    """Lines that upsd 2.8.0 sent, and one that it would."""
    assert words(line) == expected


@pytest.mark.parametrize("line", ['VAR u v "OB', 'VAR u v "OB"LB', 'VAR u v O"B"', 'VAR u v "OB\\"', "a\\b"])
def test_lines_that_are_not_nut(line):
    """Open quotes and quotes inside words are malformed."""
    with pytest.raises(MalformedLine):
        words(line)


@given(st.binary(max_size=60))
def test_bytes_are_kept(data):
    """Decoding loses nothing, and what goes into a journal can be encoded."""
    assert encode(decode(data)) == data
    printable(decode(data)).encode("utf-8")


def test_what_upsd_would_trip_over_is_escaped():
    """Quotes, backslashes and # are escaped inside quotes; plain words stay plain."""
    assert quote("ups.status") == "ups.status"
    assert quote("OB LB") == '"OB LB"'
    assert quote('a"b\\c#d') == r'"a\"b\\c\#d"'
    assert quote("") == '""'


def test_a_newline_cannot_be_sent():
    """A line break would be a second command; the error doesn't repeat what may be a password."""
    with pytest.raises(ValueError, match="control characters") as caught:
        quote("secret\nLIST UPS")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "address", "full"),
    [
        ("rack", UpsAddress("rack", "localhost", 3493), "rack@localhost:3493"),
        ("rack@ups1.example", UpsAddress("rack", "ups1.example", 3493), "rack@ups1.example:3493"),
        (" rack@10.0.0.5:13493 ", UpsAddress("rack", "10.0.0.5", 13493), "rack@10.0.0.5:13493"),
        ("ups@[::1]:3493", UpsAddress("ups", "::1", 3493), "ups@[::1]:3493"),
        ("ups@[fd00::5]", UpsAddress("ups", "fd00::5", 3493), "ups@[fd00::5]:3493"),
        ("ups@[fe80::1%eth0]:99", UpsAddress("ups", "fe80::1%eth0", 99), "ups@[fe80::1%eth0]:99"),
        (
            "!#$%&+,-./:;<=>?^_`{|}~@host",
            UpsAddress("!#$%&+,-./:;<=>?^_`{|}~", "host"),
            "!#$%&+,-./:;<=>?^_`{|}~@host:3493",
        ),
    ],
)
def test_addresses(text, address, full):
    """An address is read, and its full form is read as the same."""
    assert UpsAddress.parse(text) == address
    assert str(address) == full
    assert UpsAddress.parse(full) == address


@pytest.mark.parametrize(
    "text",
    [
        "", "@", "@host", "ups@", "ups@:3493", "ups@host:", "ups@host:0", "ups@host:65536", "ups@host:http",
        "ups@host:²", "ups@::1", "ups@fd00::5:3493", "ups@[::1", "ups@[]:3493", "ups@[::1]3493", "ups@[::1]:",
        "a b@host", "ups1 @host", "ups1\nLIST UPS@host", 'u"ps@host', "ups@ho st", "ups@host@other", "ups@host\0",
        "Akkü@host",
    ],
)  # fmt: skip
def test_addresses_that_are_none(text):
    """What can't be an address is refused with an example of one that can."""
    with pytest.raises(ConfigError, match=re.escape("write it as ups@host:port")) as caught:
        UpsAddress.parse(text)
    assert caught.value.exit_code == 3


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_config_error(text):
    """Parsing an address raises ConfigError or gives one that comes back from its own text."""
    try:
        address = UpsAddress.parse(text)
    except ConfigError:
        return
    assert UpsAddress.parse(str(address)) == address
