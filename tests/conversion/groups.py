# SPDX-License-Identifier: Apache-2.0
"""Weights, rules and comparisons that the tests of several implementations share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import strategies as st

from kimi_k3.conversion.candidates import amax_rule, mse_rule
from kimi_k3.words.weights import Int4Layout

if TYPE_CHECKING:
    import numpy.typing as npt

    from kimi_k3.conversion.candidates import Rule
    from kimi_k3.conversion.loss import Tally

    Octets = npt.NDArray[np.uint8]

GOLDEN = Path(__file__).parents[1] / "reference" / "data"
GOLDEN_NAMES = ("amax_small", "amax_all_exponents")

PUBLISHED_RULES: dict[str, Rule] = {
    "mse": mse_rule(),
    "positive": mse_rule(negative_scale=False),
    "amax": amax_rule(),
}


def golden(name: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays of one of AITER's recorded conversions."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


def _group(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(("any", "any", "few", "zeros", "extremes")))
    if kind == "any":
        return draw(st.binary(min_size=16, max_size=16))
    codes = {
        "few": draw(st.lists(st.integers(0, 15), min_size=1, max_size=3)),
        "zeros": [0, 8],
        "extremes": [7, 15],
    }
    pairs = [low | high << 4 for low in codes[kind] for high in codes[kind]]
    return bytes(draw(st.lists(st.sampled_from(pairs), min_size=16, max_size=16)))


@st.composite
def experts(
    draw: st.DrawFn, layout: Int4Layout, *, strips: bool = False, most: int = 3, most_groups: int = 10
) -> tuple[Octets, Octets]:
    """Weights and exponents of a shape that the layout can hold; a few groups are drawn, others random.

    Args:
        layout: of the result.
        strips: whether rows are multiples of 16 and groups even, whatever the layout.
        most: of experts.
        most_groups: of a row.
    """
    whole = strips or layout is Int4Layout.AITER
    rows = 16 * draw(st.integers(1, 3)) if whole else draw(st.integers(1, 40))
    groups = 2 * draw(st.integers(1, most_groups // 2)) if whole else draw(st.integers(1, most_groups - 1))
    count = draw(st.integers(1, most))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    packed = random.integers(0, 256, (count, rows, groups, 16), dtype=np.uint8)
    low, high = draw(st.sampled_from(((0, 256), (120, 128), (100, 112), (0, 8), (250, 256))))
    e8m0 = random.integers(low, high, (count, rows, groups), dtype=np.uint8)
    for _ in range(draw(st.integers(0, 12))):
        place = tuple(draw(st.integers(0, size - 1)) for size in e8m0.shape)
        packed[place] = np.frombuffer(_group(draw), np.uint8)
        e8m0[place] = draw(st.sampled_from((0, 1, 2, 3, 4, 101, 105, 108, 109, 127, 252, 253, 254, 255)))
    return packed.reshape(count, rows, groups * 16), e8m0


def random_experts(seed: int, *shape: int, exponents: tuple[int, int] = (118, 126)) -> tuple[Octets, Octets]:
    """Weights of ``[E, N, G]`` groups, every code equally likely, and exponents from a range."""
    random = np.random.default_rng(seed)
    experts, rows, groups = shape
    packed = random.integers(0, 256, (experts, rows, groups * 16), dtype=np.uint8)
    return packed, random.integers(*exponents, shape, dtype=np.uint8)


def assert_same_losses(tally: Tally, wanted: Tally, e8m0: Octets) -> None:
    """Counts and largest errors are the same, and sums are, unless exponents far apart make them inexact."""
    exact = np.ptp(e8m0.astype(int)) <= 8
    for loss, wanted_loss in zip(tally.losses(), wanted.losses(), strict=True):
        for field, value in dataclasses.asdict(wanted_loss).items():
            assert getattr(loss, field) == (value if exact else pytest.approx(value, rel=1e-12, abs=0)), field
        assert loss.max_error == wanted_loss.max_error
