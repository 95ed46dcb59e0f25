"""How anchors are dealt: every valid position alike, every token alike, spread where asked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.errors import ConfigError
from dflash.train.batches import AnchorConfig, choose_anchors

EPOCHS = 4000
SAMPLINGS = ("uniform", "stratified")


def drawn(config: AnchorConfig, mask: np.ndarray) -> list[np.ndarray]:
    """Anchors of one sample in many epochs."""
    return [choose_anchors(mask, 77, epoch, config) for epoch in range(EPOCHS)]


def excess(counts: np.ndarray, probability: float) -> float:
    """Standard deviations by which chi-square exceeds its mean, for counts that should all be alike."""
    variance = EPOCHS * probability * (1 - probability)
    chi_square = float(((counts - EPOCHS * probability) ** 2).sum() / variance)
    return (chi_square - len(counts)) / (2 * len(counts)) ** 0.5


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("density", [0.1, 0.3, 0.7])
def test_every_valid_position_is_equally_likely_to_be_an_anchor(sampling: str, density: float) -> None:
    mask = np.array([0] * 9 + [1] * 31 + [0] * 5 + [1] * 17, np.uint8)
    config = AnchorConfig(density=density, sampling=sampling)
    picks = drawn(config, mask)
    valid = np.flatnonzero(mask[:-1] & mask[1:])
    counts = np.bincount(np.concatenate(picks), minlength=len(mask))
    assert counts.sum() == counts[valid].sum()
    assert excess(counts[valid], len(picks[0]) / len(valid)) < 4


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_token_with_a_whole_block_of_anchors_before_it_is_equally_likely_to_be_covered(
    sampling: str,
) -> None:
    """Tokens near the beginning of a response have fewer anchors before them; there is no way round that."""
    size, length = 4, 60
    mask = np.ones(length, np.uint8)
    covered = np.zeros(length, np.int64)
    for anchors in drawn(AnchorConfig(density=0.2, sampling=sampling), mask):
        reach = np.unique(anchors[:, None] + np.arange(1, size))
        covered[reach[reach < length]] += 1
    whole = covered[size - 1 : length]
    assert excess(whole, whole.mean() / EPOCHS) < 4
    assert covered[1] < whole.min()


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=120),
    st.floats(0.01, 1),
    st.integers(1, 40),
    st.sampled_from(SAMPLINGS),
)
def test_anchors_are_different_valid_ascending_and_as_many_as_asked(mask, density, most, sampling) -> None:
    loss_mask = np.array(mask, np.uint8)
    config = AnchorConfig(most, density, sampling=sampling)
    anchors = choose_anchors(loss_mask, 5, 1, config)
    valid = np.flatnonzero(loss_mask[:-1] & loss_mask[1:])
    assert set(anchors) <= set(valid)
    assert (np.diff(anchors) > 0).all()
    assert len(anchors) == min(len(valid), most, max(1, round(density * int(loss_mask.sum()))))
    assert np.array_equal(anchors, choose_anchors(loss_mask, 5, 1, config))


def test_stratified_anchors_are_spread_and_cover_more() -> None:
    mask = np.ones(400, np.uint8)
    gaps, covered = {}, {}
    for sampling in SAMPLINGS:
        picks = drawn(AnchorConfig(density=0.1, sampling=sampling), mask)[:200]
        gaps[sampling] = max(int(np.diff(anchors).max()) for anchors in picks)
        covered[sampling] = np.mean([len(np.unique(anchors[:, None] + np.arange(1, 8))) for anchors in picks])
    assert gaps["stratified"] < 2 * 11
    assert gaps["uniform"] > 2 * 11
    assert covered["stratified"] > 1.1 * covered["uniform"]


def test_another_way_to_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match="--anchor-sampling 'even' is not one of uniform, stratified"):
        AnchorConfig(sampling="even")
