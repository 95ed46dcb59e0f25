"""Dealing a step: nothing exceeds the budget, nothing is lost, and the work is even."""

from __future__ import annotations

from corpora import for_all, quick_and_long
from hypothesis import strategies as st

from dflash.train.packing import Packing, deal, deal_prefix

LENGTHS = st.lists(st.integers(1, 1000), max_size=120)
PACKINGS = st.builds(
    Packing, st.integers(1, 16), st.integers(1000, 5000), st.floats(0.1, 10), st.floats(0, 1)
)


@quick_and_long(150, 2000)
def test_a_dealt_step_is_a_prefix_within_the_budget(examples: int) -> None:
    @for_all(examples, LENGTHS, PACKINGS)
    def check(lengths: list[int], packing: Packing) -> None:
        dealt = deal_prefix(lengths, packing)
        assert len(dealt) == packing.slots
        assert all(sum(lengths[index] for index in slot) <= packing.budget for slot in dealt)
        taken = sorted(index for slot in dealt for index in slot)
        assert taken == list(range(len(taken)))
        # A prefix that no dealing could refuse is taken whole: any `slots` samples fit, one each.
        assert len(taken) >= min(len(lengths), packing.slots)


def test_what_cannot_fit_is_refused_rather_than_squeezed() -> None:
    packing = Packing(2, 100, 1.0, 0.0)
    assert deal([60, 60, 60], packing) is None
    assert [sorted(slot) for slot in deal_prefix([60, 60, 60], packing)] == [[0], [1]]


def test_the_costliest_samples_go_to_different_slots() -> None:
    dealt = deal([10, 900, 10, 900, 900, 10], Packing(3, 1000, 1.0, 0.01))
    assert dealt is not None
    assert all(len({1, 3, 4} & set(slot)) == 1 for slot in dealt)


def test_a_shorter_sample_still_fits_where_a_longer_one_did_not() -> None:
    """The cheapest slot may be too full for one sample and right for the next."""
    dealt = deal([70, 65, 40, 30], Packing(2, 105, 1.0, 0.0))
    assert dealt is not None
    assert sorted(map(sorted, dealt)) == [[0, 3], [1, 2]]
