# SPDX-License-Identifier: Apache-2.0
"""Groups that hold NaN or infinite values: which is the first, and the error that names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kimi_k3.conversion.candidates import E8M0_NAN, NONFINITE_FROM

if TYPE_CHECKING:
    import numpy.typing as npt


class NonFiniteGroupError(ValueError):
    """A group whose values are NaN or exceed bf16; ``expert``, ``row`` and ``group`` say which."""

    def __init__(self, expert: int, row: int, group: int, e8m0: int) -> None:
        what = "is NaN (E8M0 scale 255)" if e8m0 == E8M0_NAN else f"exceeds bf16 (E8M0 scale {e8m0})"
        super().__init__(f"expert {expert}, row {row}, group {group} {what}")
        self.expert, self.row, self.group, self.e8m0 = expert, row, group, e8m0


def require_finite(
    packed: npt.NDArray[np.uint8], e8m0: npt.NDArray[np.uint8], *, first_expert: int = 0, first_row: int = 0
) -> None:
    """Raise if a group of ``[E, N, K / 2]`` MXFP4 with ``[E, N, K / 32]`` scales is not finite.

    Args:
        packed: part of the experts' weights.
        e8m0: their scales.
        first_expert: number of the first expert in it, for the message.
        first_row: number of the first row in it.

    Raises:
        NonFiniteGroupError: the first such group, in the order of experts, rows and groups.
    """
    # Only the largest scales can make a value that bf16 cannot hold, so few groups are looked at.
    for expert, row, group in np.argwhere(e8m0 >= min(NONFINITE_FROM)).tolist():
        half = packed[expert, row, 16 * group : 16 * group + 16] & 0x77
        largest = int(max((half & 0xF).max(), (half >> 4).max()))
        if e8m0[expert, row, group] >= NONFINITE_FROM[largest]:
            raise NonFiniteGroupError(
                first_expert + expert, first_row + row, group, int(e8m0[expert, row, group])
            )
