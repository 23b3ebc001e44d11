# SPDX-License-Identifier: Apache-2.0
"""The instructions that numba has no words for, on their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from kimi_k3.conversion import cpu_instructions

if TYPE_CHECKING:
    import numpy.typing as npt


def _one(codes: Any, target: Any, scales: Any, rows: Any, largest: Any, group: int, where: Any) -> None:
    (option, _), (octet, _) = where
    cpu_instructions.rewrite(codes, target, scales, rows, largest, group, option, octet)


def _two(codes: Any, target: Any, scales: Any, rows: Any, largest: Any, group: int, where: Any) -> None:
    options, octets = where
    cpu_instructions.rewrite_two(codes, target, scales, rows, largest, group, options, octets)


@pytest.fixture(scope="module", params=["instructions of this machine", "no such instructions"])
def rewriters(request: pytest.FixtureRequest) -> Any:
    """Both, compiled, with and without the look-up that the machine has."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param.startswith("no"):
            patch.setattr(cpu_instructions, "SHUFFLES", {})
        compiled = njit(_one), njit(_two)
        for run in compiled:
            # Compiles, as long as the patch holds.
            run(*_arrays(bytes(64), bytes(3 * cpu_instructions.ROW_BYTES)), 0, ((0, 0), (0, 0)))
    return compiled


def _arrays(codes: bytes, rows: bytes) -> tuple[npt.NDArray[Any], ...]:
    """Codes, rewritten in place; scales, rows and largest ranks, of which some are there."""
    groups = np.frombuffer(codes, np.uint8).copy()
    table = np.frombuffer(rows, np.uint8).reshape(3, cpu_instructions.ROW_BYTES).copy()
    table[:, :16] &= 15
    return groups, groups, np.full(4, 7, np.uint16), table, np.full((256, 32), 3, np.uint8)


@given(
    count=st.integers(1, 2),
    codes=st.binary(min_size=64, max_size=64),
    rows=st.binary(min_size=3 * cpu_instructions.ROW_BYTES, max_size=3 * cpu_instructions.ROW_BYTES),
    group=st.integers(0, 2),
    options=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    octets=st.tuples(st.integers(0, 255), st.integers(0, 255))
    | st.integers(0, 255).map(lambda one: (one, one)),
)
@settings(max_examples=200, deadline=None)
def test_groups_are_rewritten_by_their_options_and_no_other_is_touched(
    rewriters: Any,
    count: int,
    codes: bytes,
    rows: bytes,
    group: int,
    options: tuple[int, int],
    octets: tuple[int, int],
) -> None:
    """On a machine without a look-up of bytes the conversion may be slow but not wrong."""
    arrays = _arrays(codes, rows)
    rewriters[count - 1](*arrays, group, (options, octets))
    target, _, scales, _, largest = arrays
    wanted, _, wanted_scales, table, least = _arrays(codes, rows)
    ranks = least.max(axis=1).astype(int)
    for number, (option, octet) in enumerate(list(zip(options, octets, strict=True))[:count]):
        here = slice(16 * (group + number), 16 * (group + number) + 16)
        row, low, high = table[option], wanted[here] & 15, wanted[here] >> 4
        ranks[octet] = max(ranks[octet], row[16 + low].max(), row[16 + high].max())
        wanted[here] = row[low] | row[high] << 4
        wanted_scales[group + number] = row[32:].view(np.uint16)[octet]
    assert np.array_equal(target, wanted)
    assert np.array_equal(scales, wanted_scales)
    assert np.array_equal(largest.max(axis=1), ranks)


def test_powers_of_two() -> None:
    """They are made from bits, for every exponent that a group's error or its square needs."""
    power = njit(lambda exponent: cpu_instructions.power_of_two(exponent))
    assert [power(n) for n in range(-254, 257)] == [2.0**n for n in range(-254, 257)]
