# SPDX-License-Identifier: Apache-2.0
"""What a conversion lost, in figures that add up over experts, ranks and layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt


@dataclass(frozen=True)
class Loss:
    """The loss of converting some groups.

    Attributes:
        groups: groups converted.
        lossless_groups: groups whose 32 values are all reproduced exactly, all-zero ones included.
        zero_groups: groups of zeros.
        nonfinite_groups: groups with NaN or infinite values. No other figure but ``groups`` counts them.
        clamped_groups: groups too small for a scale of their own: those that AITER raises to 1e-6 (rule
            ``amax``), or below bf16's normal range (rule ``mse``).
        squared_error: sum of (w - w')^2, w the MXFP4 value and w' the value that the kernel uses.
        energy: sum of w^2.
        max_error: max |w - w'|.
    """

    groups: int = 0
    lossless_groups: int = 0
    zero_groups: int = 0
    nonfinite_groups: int = 0
    clamped_groups: int = 0
    squared_error: float = 0.0
    energy: float = 0.0
    max_error: float = 0.0

    @property
    def relative_mse(self) -> float | None:
        """Squared error over energy; None when every weight is zero."""
        return self.squared_error / self.energy if self.energy > 0 else None


def total(losses: Iterable[Loss]) -> Loss:
    """The loss of all parts together; sums are correctly rounded, whatever the order."""
    parts = list(losses)
    return Loss(
        groups=sum(part.groups for part in parts),
        lossless_groups=sum(part.lossless_groups for part in parts),
        zero_groups=sum(part.zero_groups for part in parts),
        nonfinite_groups=sum(part.nonfinite_groups for part in parts),
        clamped_groups=sum(part.clamped_groups for part in parts),
        squared_error=math.fsum(part.squared_error for part in parts),
        energy=math.fsum(part.energy for part in parts),
        max_error=max((part.max_error for part in parts), default=0.0),
    )


def worst(losses: Mapping[int, Loss]) -> tuple[int, float] | None:
    """The expert of the highest relative MSE, the first of equals, and that; None if none has one.

    Args:
        losses: by the experts' numbers.
    """
    known = {
        expert: relative for expert in sorted(losses) if (relative := losses[expert].relative_mse) is not None
    }
    expert = max(known, key=known.__getitem__, default=None)
    return None if expert is None else (expert, known[expert])


@dataclass(frozen=True)
class Tally:
    """What an implementation counts while it converts: ``[E, P]`` arrays over the experts' parts.

    A part is whatever the implementation sums up at once, a strip of rows or a row. Its sums are float64 and
    exact unless its exponents span more than about nine bits; the sum over parts is correctly rounded. So
    implementations with different parts agree.

    Attributes:
        groups_per_expert: groups of one expert.
        lossless: int64, as ``Loss.lossless_groups``; so the next three.
        zero: int64.
        nonfinite: int64.
        clamped: int64.
        squared_error: float64.
        energy: float64.
        max_error: float64.
    """

    groups_per_expert: int
    lossless: npt.NDArray[np.int64]
    zero: npt.NDArray[np.int64]
    nonfinite: npt.NDArray[np.int64]
    clamped: npt.NDArray[np.int64]
    squared_error: npt.NDArray[np.float64]
    energy: npt.NDArray[np.float64]
    max_error: npt.NDArray[np.float64]

    def losses(self) -> tuple[Loss, ...]:
        """One loss per expert."""
        counted = (self.lossless, self.zero, self.nonfinite, self.clamped)
        lossless, zero, nonfinite, clamped = (part.sum(axis=1).tolist() for part in counted)
        squared_error, energy = (part.tolist() for part in (self.squared_error, self.energy))
        max_error = self.max_error.max(axis=1, initial=0.0).tolist()
        return tuple(
            Loss(
                groups=self.groups_per_expert,
                lossless_groups=lossless[expert],
                zero_groups=zero[expert],
                nonfinite_groups=nonfinite[expert],
                clamped_groups=clamped[expert],
                squared_error=math.fsum(squared_error[expert]),
                energy=math.fsum(energy[expert]),
                max_error=max_error[expert],
            )
            for expert in range(len(max_error))
        )


def joined(tallies: Sequence[Tally]) -> Tally:
    """The tally of experts that were converted one after the other, with the same shapes."""

    def stacked(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(tally, name) for tally in tallies])

    names = [field.name for field in fields(Tally) if field.name != "groups_per_expert"]
    return Tally(tallies[0].groups_per_expert, *map(stacked, names))
