"""Who writes what of what ranks hold alike: laws of the plan."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from powerguard.generations.split import GRAIN_BYTES, SHARE_MAX, SNAP_BYTES, Item, digest, shares, split

MIB = 1 << 20
items = st.lists(
    st.tuples(st.integers(1, 40 * MIB), st.booleans()).map(lambda pair: pair), min_size=1, max_size=12
).map(lambda sizes: [Item(f"p{number}", size, whole) for number, (size, whole) in enumerate(sizes)])
weights = st.lists(st.one_of(st.floats(0, 1e6), st.sampled_from([-1.0, math.inf, math.nan, 1e-300])), max_size=9)


@given(items, st.integers(1, 9), weights)
def test_every_byte_is_written_exactly_once(parts, count, given_weights):
    """Whatever the sizes and weights: together all bytes, none twice, none outside; what can't be cut is one piece."""
    cuts = [cut for mine in split(parts, count, given_weights) for cut in mine]

    for part in parts:
        mine = sorted((cut.begin, cut.end) for cut in cuts if cut.name == part.name)
        assert mine[0][0] == 0
        assert mine[-1][1] == part.bytes
        assert all(before[1] == after[0] for before, after in itertools.pairwise(mine))
        assert all(begin < end for begin, end in mine)
        assert not part.whole or len(mine) == 1
        assert all(begin % GRAIN_BYTES == 0 for begin, _ in mine)


@given(items, st.integers(1, 9))
def test_equal_ranks_write_about_as_much(parts, count):
    """Without weights no rank is further from its share than a cut may be moved."""
    parts = [item._replace(whole=False) for item in parts]
    total = sum(item.bytes for item in parts)

    for mine in split(parts, count):
        assert abs(sum(cut.end - cut.begin for cut in mine) - total / count) <= 2 * (SNAP_BYTES + GRAIN_BYTES)


@given(st.integers(1, 50), weights)
def test_shares_sum_to_one_and_none_is_above_the_most(count, given_weights):
    """What memory was made for is never exceeded, and nothing is left over, for any weights."""
    found = shares(count, given_weights)

    assert len(found) == count
    assert math.isclose(sum(found), 1.0, rel_tol=1e-6)
    assert all(-1e-12 <= share <= min(1.0, SHARE_MAX / count) + 1e-9 for share in found)


def test_shares_follow_the_weights():
    """In proportion, as far as the most allows; ranks without a weight take what is left only."""
    assert (0.25, 0.25, 0.5) == shares(3, (1, 1, 2))
    assert (1.0, 0.0) == shares(2, (5, 0))
    assert (0.5, 0.5, 0.0, 0.0) == shares(4, (1, 1, 0, 0))
    assert (0.5, 0.1, 0.2, 0.2) == tuple(round(share, 6) for share in shares(4, (100, 1, 2, 2)))
    assert (0.5, 0.5) == shares(2, (0, 0))
    assert (0.5, 0.5) == shares(2, (math.nan, -3))


def test_the_plan_does_not_depend_on_the_order_of_the_state():
    """Ranks that name their parts in another order make the same plan, and the digest says so."""
    parts = [Item("b", 5 * MIB), Item("a", 3 * MIB), Item("c", MIB)]
    one, other = split(parts, 2), split(parts[::-1], 2)

    assert one == other
    assert digest(parts, (0, 1), one) == digest(parts[::-1], (0, 1), other)


def test_the_digest_tells_plans_apart():
    """Another size, group, weight or name is another plan."""
    parts = [Item("a", 5 * MIB)]
    seen = {
        digest(parts, (0, 1), split(parts, 2)),
        digest(parts, (0, 2), split(parts, 2)),
        digest(parts, (0, 1), split(parts, 2, (1, 3))),
        digest([Item("a", 5 * MIB + 1)], (0, 1), split(parts, 2)),
        digest([Item("b", 5 * MIB)], (0, 1), split([Item("b", 5 * MIB)], 2)),
    }

    assert 5 == len(seen)
