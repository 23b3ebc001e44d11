# SPDX-License-Identifier: Apache-2.0
"""How far one predicted distribution is from another, of which only the likeliest tokens are known. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

ROUNDING = 2e-6
"""What rounding may add up to in one minus a sum of probabilities that a server computed in float32: what the
unknown tokens have is not told apart from that."""


def divergence(exact: Mapping[int, float], other: Mapping[int, float]) -> float:
    """The least that KL(exact || other) can be, in nats.

    A server tells the logarithms of the likeliest tokens only (vLLM of 20). Tokens that both name are
    compared one by one, all others together; by the chain rule and the data processing inequality (Cover and
    Thomas, 2.5 and 2.8) that is never more than the whole divergence. What the second server does not name
    it holds for less likely than all it names.

    Args:
        exact, other: natural logarithm of the probability, by token; not empty.
    """
    shared = exact.keys() & other.keys()
    first, second = _mass(exact, shared), _mass(other, shared)
    return _among(exact, other, shared, first, second) + _beside(exact, other, shared, first, second)


def top_token(predicted: Mapping[int, float]) -> int:
    """The likeliest token; of equally likely ones that of the smallest number."""
    return min(predicted, key=lambda token: (-predicted[token], token))


def _mass(predicted: Mapping[int, float], tokens: set[int]) -> float:
    return math.fsum(math.exp(predicted[token]) for token in tokens)


def _among(
    exact: Mapping[int, float], other: Mapping[int, float], shared: set[int], first: float, second: float
) -> float:
    """Within the tokens that both name, each side made to sum to one; times what the first gives them.

    As a sum of terms that are all positive, ``q ((1 + t) log(1 + t) - t)`` with ``p = q (1 + t)``: rounding
    of the probabilities then counts by its square.
    """
    if not shared:
        return 0.0
    shift = math.log(second) - math.log(first)
    terms = []
    for token in shared:
        change = math.expm1(exact[token] - other[token] + shift)
        share = math.exp(other[token]) / second
        terms.append(share * ((1 + change) * math.log1p(change) - change) if change > -1 else share)
    return min(first, 1.0) * max(0.0, math.fsum(terms))


def _beside(
    exact: Mapping[int, float], other: Mapping[int, float], shared: set[int], first: float, second: float
) -> float:
    """Between the tokens that both name, those that only the first names, and the rest."""
    left, right = max(0.0, 1 - first), max(0.0, 1 - second)
    if max(left, right) < ROUNDING:
        return 0.0
    left, right = max(left, ROUNDING), max(right, ROUNDING)
    only = set(exact.keys() - other.keys())
    named = min(left, _mass(exact, only))
    # What the second has for them at most: all that it has not given to others, and each less than its least.
    spare = max(ROUNDING, right - _mass(other, set(other.keys() - exact.keys())))
    most = min(spare, len(only) * math.exp(min(other.values())))
    total = _term(1 - left, 1 - right)
    if named > ROUNDING and most < right * named / left:
        return max(0.0, total + _term(named, most) + _term(left - named, right - most))
    return max(0.0, total + _term(left, right))


def _term(p: float, q: float) -> float:
    return p * math.log(p / max(q, ROUNDING)) if p > ROUNDING else 0.0
