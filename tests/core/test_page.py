"""The bytes of a rank's shared page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from powerguard.core import page


@given(st.integers(0, 2**32), st.integers(-1, 2**53 - 1))
def test_a_page_reads_as_it_was_written(pid, step):
    """Blank pages carry pid and step, and the step's cell is where the hot path stores."""
    data = bytearray(page.blank(pid, -1))
    memoryview(data).cast("q")[page.CELL] = step

    assert len(data) == page.BYTES
    assert page.read(bytes(data)) == page.Page(pid, step)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_page_or_none(data):
    """A page comes from another user's file: whatever is in it, the answer is a page or None."""
    found = page.read(data)

    assert found is None or (data.startswith(page.MAGIC) and found.step >= -1)


def test_an_impossible_step_is_no_page():
    """A negative step, or one beyond any run, says that the page is damaged."""
    for step in (-2, 2**53):
        data = bytearray(page.blank(1))
        memoryview(data).cast("q")[page.CELL] = step

        assert page.read(bytes(data)) is None
