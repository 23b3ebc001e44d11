# SPDX-License-Identifier: Apache-2.0
"""What a conversion lost, in figures that add up over experts, ranks and layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Loss:
    """The loss of converting some groups.

    Attributes:
        groups: groups converted.
        lossless_groups: groups whose 32 values are all reproduced exactly, all-zero ones included.
        zero_groups: groups of zeros.
        squared_error: sum of (w - w')^2, w the MXFP4 value and w' the value that the kernel uses.
        energy: sum of w^2.
        max_error: max |w - w'|.
    """

    groups: int = 0
    lossless_groups: int = 0
    zero_groups: int = 0
    squared_error: float = 0.0
    energy: float = 0.0
    max_error: float = 0.0

    def __add__(self, other: Loss) -> Loss:
        """The loss of both parts together."""
        return Loss(
            groups=self.groups + other.groups,
            lossless_groups=self.lossless_groups + other.lossless_groups,
            zero_groups=self.zero_groups + other.zero_groups,
            squared_error=self.squared_error + other.squared_error,
            energy=self.energy + other.energy,
            max_error=max(self.max_error, other.max_error),
        )
