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


def _run(codes: Any, target: Any, levels: Any, ranks: Any, group: int, option: int) -> Any:
    return cpu_instructions.rewrite(codes, target, levels, ranks, group, option)


@pytest.fixture(scope="module", params=["an instruction of this machine", "no such instruction"])
def rewriter(request: pytest.FixtureRequest) -> Any:
    """A compiled rewrite, with and without the look-up that the machine has."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param.startswith("no"):
            patch.setattr(cpu_instructions, "SHUFFLES", {})
        run = njit(_run)
        table = np.zeros((1, 16), np.uint8)
        # Compiles, as long as the patch holds.
        run(np.zeros(16, np.uint8), np.zeros(16, np.uint8), table, table, 0, 0)
    return run


_TABLES = st.binary(min_size=48, max_size=48).map(
    lambda octets: np.frombuffer(octets, np.uint8).reshape(3, 16)
)


@given(
    codes=st.binary(min_size=64, max_size=64).map(lambda octets: np.frombuffer(octets, np.uint8).copy()),
    levels=_TABLES,
    ranks=_TABLES,
    group=st.integers(0, 3),
    option=st.integers(0, 2),
)
@settings(max_examples=200, deadline=None)
def test_a_group_is_rewritten_by_its_option_and_no_other_is_touched(
    rewriter: Any,
    codes: npt.NDArray[np.uint8],
    levels: npt.NDArray[np.uint8],
    ranks: npt.NDArray[np.uint8],
    group: int,
    option: int,
) -> None:
    """On a machine without a look-up of bytes the conversion may be slow but not wrong."""
    levels = (levels & 15).astype(np.uint8)
    low, high = codes & 15, codes >> 4
    here = slice(16 * group, 16 * group + 16)
    wanted = codes.copy()
    wanted[here] = (levels[option][low] | levels[option][high] << 4)[here]
    target = codes.copy()
    largest = rewriter(target, target, levels, ranks.copy(), group, option)
    assert np.array_equal(target, wanted)
    assert largest == max(ranks[option][low[here]].max(), ranks[option][high[here]].max())
