"""docs/security.md: every test that it leans on is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLAIMS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/security.md").read_text())


def test_the_page_names_its_tests():
    """Each row of its tables, but for root's, has at least one."""
    rows = [line for line in (ROOT / "docs/security.md").read_text().splitlines() if line.startswith("| ")]
    bare = [row for row in rows if "::test_" not in row and "|---" not in row]

    assert len(CLAIMS) > 40
    assert [row.split("|")[1].strip() for row in bare] == ["who", "root", "what comes in"]


@pytest.mark.parametrize(("file", "name"), sorted(set(CLAIMS)))
def test_each_named_test_is_there(file, name):
    """A renamed or removed test leaves no claim behind."""
    assert re.search(rf"(?m)^def {name}\(", (ROOT / file).read_text()), f"{file} has no {name}"
