"""The README says what the code says."""

import re
import textwrap
from pathlib import Path

import pytest

from powerguard.cli import exit_codes
from powerguard.core import transition

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(name):
    """What stands between `<!-- name: ... -->` and `<!-- end -->`."""
    return re.search(rf"<!-- {name}: .*? -->\n(.*?)\n<!-- end -->", README, re.DOTALL).group(1)


def test_exit_codes():
    """The table of exit codes is the one that the command line follows."""
    assert exit_codes.markdown().rstrip() == block("exit codes")


def test_phases():
    """The drawing of the phases is the one at the top of the file that owns them."""
    drawn = transition.__doc__.split("::\n\n", 1)[1].split("\n\nRule 2", 1)[0]

    assert f"```\n{textwrap.dedent(drawn).rstrip()}\n```" == block("phases")


@pytest.mark.parametrize(
    "page", sorted(p.relative_to(ROOT) for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]), ids=str
)
def test_links(page):
    """Every link to a file leads to one."""
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).exists(), target
