# SPDX-License-Identifier: Apache-2.0
"""How far two distributions are apart, of which a server tells the likeliest tokens."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.verify.divergence import ROUNDING, divergence, top_token

TOKENS = 200


def distribution(random: Random, spread: float) -> dict[int, float]:
    """Logarithms that a softmax of normal numbers gives."""
    raw = [random.gauss(0, spread) for _ in range(TOKENS)]
    total = math.log(math.fsum(math.exp(value) for value in raw))
    return {token: value - total for token, value in enumerate(raw)}


def near(exact: dict[int, float], random: Random, noise: float) -> dict[int, float]:
    raw = {token: value + random.gauss(0, noise) for token, value in exact.items()}
    total = math.log(math.fsum(math.exp(value) for value in raw.values()))
    return {token: value - total for token, value in raw.items()}


def likeliest(whole: dict[int, float], count: int) -> dict[int, float]:
    return dict(sorted(whole.items(), key=lambda item: -item[1])[:count])


def true(exact: dict[int, float], other: dict[int, float]) -> float:
    return math.fsum(math.exp(exact[token]) * (exact[token] - other[token]) for token in exact)


@given(
    st.integers(0, 2**32),
    st.sampled_from([0.5, 2.0, 6.0]),
    st.sampled_from([0.0, 1e-4, 0.03, 1.0, 5.0]),
    st.sampled_from([1, 5, 20, TOKENS]),
)
def test_it_is_never_more_than_the_whole_divergence(
    seed: int, spread: float, noise: float, count: int
) -> None:
    """What is reported as lost was lost for sure, whichever tokens were told."""
    random = Random(seed)
    exact = distribution(random, spread)
    other = near(exact, random, noise)
    found = divergence(likeliest(exact, count), likeliest(other, count))
    # Masses below the rounding are taken for it, which moves the result by about as much.
    assert 0 <= found <= true(exact, other) + 20 * ROUNDING
    if count == TOKENS:
        assert found == pytest.approx(true(exact, other), rel=1e-6, abs=1e-12)


@given(st.integers(0, 2**32), st.sampled_from([2.0, 6.0]))
def test_most_of_a_small_difference_is_found_with_twenty_tokens(seed: int, spread: float) -> None:
    """A bound that is always true because it is always zero would tell nothing."""
    random = Random(seed)
    exact = distribution(random, 6.0)
    other = near(exact, random, spread / 100)
    assert divergence(likeliest(exact, 20), likeliest(other, 20)) >= 0.5 * true(exact, other)


def test_two_that_agree_on_nothing_are_far_apart() -> None:
    """A broken kernel predicts quite other tokens: none is shared, and that must not look like agreement."""
    exact = {token: math.log(0.05) for token in range(20)}
    other = {token: math.log(0.049) for token in range(100, 120)}
    assert divergence(exact, other) > 2


@pytest.mark.parametrize("size", [1e-5, 1e-3])
def test_the_rounding_of_a_server_counts_for_nothing(size: float) -> None:
    """Float32 moves a logarithm near zero by 1e-7; real differences are still seen."""
    exact = {1: math.log1p(-size), 2: math.log(size)}
    rounded = {1: math.log1p(-size) + 1e-7, 2: math.log(size) * (1 + 1e-7)}
    assert divergence(exact, rounded) < 1e-11
    other = {1: math.log1p(-size * 1.1), 2: math.log(size * 1.1)}
    assert divergence(exact, other) == pytest.approx(true(exact, other), rel=0.01)


def test_the_likeliest_token_is_one_even_among_equals() -> None:
    """Two servers that tell equals in another order agree."""
    assert top_token({7: -1.0, 3: -1.0, 5: -2.0}) == top_token({3: -1.0, 7: -1.0}) == 3
