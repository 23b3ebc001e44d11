# SPDX-License-Identifier: Apache-2.0
"""Figures that must add up, whoever counted them and in whatever order."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.conversion.loss import Loss, Tally, joined, total

if TYPE_CHECKING:
    from random import Random

COUNTS = st.integers(0, 10**12)
SUMS = st.floats(min_value=0, max_value=1e30)
LOSSES = st.builds(
    Loss,
    groups=COUNTS,
    lossless_groups=COUNTS,
    zero_groups=COUNTS,
    nonfinite_groups=COUNTS,
    clamped_groups=COUNTS,
    squared_error=SUMS,
    energy=SUMS,
    max_error=SUMS,
)


def _tally(seed: int, experts: int, parts: int) -> Tally:
    random = np.random.default_rng(seed)
    counts = random.integers(0, 100, (4, experts, parts))
    # Sums far apart: added one after another, the small ones would be lost.
    sums = random.random((3, experts, parts)) * 2.0 ** random.integers(-60, 60, (3, experts, parts))
    return Tally(4096, *counts, *sums)


@given(st.lists(LOSSES, max_size=6), st.randoms(use_true_random=False))
def test_a_total_does_not_depend_on_the_order(losses: list[Loss], random: Random) -> None:
    """Ranks finish in any order, and two reports of one model should be the same."""
    shuffled = random.sample(losses, len(losses))
    assert total(shuffled) == total(losses)


@given(st.lists(LOSSES, max_size=6))
def test_a_total_is_the_sum_of_the_parts(losses: list[Loss]) -> None:
    """The report of a model is that of its layers; each figure adds up in its own way."""
    whole = total(iter(losses))
    for name in ("groups", "lossless_groups", "zero_groups", "nonfinite_groups", "clamped_groups"):
        assert getattr(whole, name) == sum(getattr(loss, name) for loss in losses)
    for name in ("squared_error", "energy"):
        assert getattr(whole, name) == float(sum(Fraction(getattr(loss, name)) for loss in losses))
    assert whole.max_error == max((loss.max_error for loss in losses), default=0.0)


def test_nothing_has_lost_nothing() -> None:
    """A rank may hold no expert of a layer, and zeros have no error to relate."""
    assert total([]) == Loss()
    assert Loss(groups=3, zero_groups=3).relative_mse is None
    assert Loss(squared_error=1.0, energy=4.0).relative_mse == 0.25


def test_a_tally_gives_each_expert_its_figures() -> None:
    """Parts are an implementation's own business; the report speaks of experts."""
    tally = _tally(1, 3, 5)
    losses = tally.losses()
    assert len(losses) == 3
    for expert, loss in enumerate(losses):
        assert loss == Loss(
            groups=4096,
            lossless_groups=int(tally.lossless[expert].sum()),
            zero_groups=int(tally.zero[expert].sum()),
            nonfinite_groups=int(tally.nonfinite[expert].sum()),
            clamped_groups=int(tally.clamped[expert].sum()),
            squared_error=math.fsum(tally.squared_error[expert]),
            energy=math.fsum(tally.energy[expert]),
            max_error=tally.max_error[expert].max(),
        )
        # A report is written as JSON, which knows no numpy.
        assert type(loss.lossless_groups) is int
        assert type(loss.max_error) is float


@pytest.mark.parametrize("parts", [0, 1])
def test_an_expert_without_rows_has_lost_nothing(parts: int) -> None:
    """Empty arrays have no maximum."""
    tally = Tally(0, *np.zeros((4, 2, parts), np.int64), *np.zeros((3, 2, parts)))
    assert tally.losses() == (Loss(), Loss())


def test_the_parts_order_does_not_matter() -> None:
    """Threads and programs write their sums where they like."""
    tally = _tally(2, 1, 40)
    order = np.random.default_rng(3).permutation(40)
    arrays = {name: value[:, order] for name, value in vars(tally).items() if name != "groups_per_expert"}
    assert Tally(4096, **arrays).losses() == tally.losses()


def test_tallies_of_experts_are_joined_in_their_order() -> None:
    """Converted one after another, experts must be counted as if converted at once."""
    tallies = [_tally(seed, experts, 4) for seed, experts in ((4, 1), (5, 2))]
    assert joined(tallies).losses() == tallies[0].losses() + tallies[1].losses()
    assert joined(tallies[:1]).losses() == tallies[0].losses()
