# SPDX-License-Identifier: Apache-2.0
"""A rule's tables in the form that a bit-plane kernel wants.

Such a kernel holds 32 codes as planes of one bit each, so a level is written plane by plane: bit k of a level
is set where a code is one of those, for the chosen candidate, whose level has that bit. For each bit and code
the tables name the candidates for which that is so, as a set of bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from kimi_k3.conversion.candidates import E8M0_BIAS, FOURFOLD_SQUARES, GROUP_SIZE, MAGNITUDES, NONFINITE_FROM

if TYPE_CHECKING:
    import numpy.typing as npt

    from kimi_k3.conversion.candidates import Rule

#: Candidates are numbered in four bits, signs included.
MOST_CHOICES = 16
#: Codes of a magnitude that is not zero.
CODES = range(1, 8)
_FLOAT32_BIAS = 127
_FLOAT32_MANTISSA = 23
#: Bits of an error's mantissa that a key keeps; the tables' errors have fewer.
KEY_EXPONENT = 15
_KEY_SHIFT = _FLOAT32_MANTISSA - KEY_EXPONENT


@dataclass(frozen=True)
class KernelTables:
    """Constants of a kernel. Codes count from 0 here: entry 0 is code 1.

    Attributes:
        levels: ``[bit][code]``, the number of the set of candidates whose level has that bit; 0 if none has.
        eights: ``[code]``, that of those whose level is 8 on the long side, so 7 on the short one.
        squares: ``[candidate][code]``, squared error on the short side.
        long_squares: the same on the long side.
        sided: ``[candidate]``, whether a sign makes a difference.
        energies: ``[code]``, four times the squared magnitude.
        signs: how many signs compete.
        by_error: whether the least error decides.
        fraction_bits: of the rule.
        dropped_below: of the rule.
        clamped_offset: of the rule.
        normal_from: ``[code]``, of the rule.
        columns: see :func:`columns_of`.
        sets: how many sets of candidates there are.
        split: ``[code]``, whether some candidate represents it by 8 on the long side.
        nonfinite_from: ``[code]``.
    """

    levels: tuple[tuple[int, ...], ...]
    eights: tuple[int, ...]
    squares: tuple[tuple[int, ...], ...]
    long_squares: tuple[tuple[int, ...], ...]
    sided: tuple[bool, ...]
    energies: tuple[int, ...]
    signs: int
    by_error: bool
    fraction_bits: int
    dropped_below: int
    clamped_offset: int
    normal_from: tuple[int, ...]
    columns: tuple[tuple[int, bool], ...]
    sets: int
    split: tuple[bool, ...]
    nonfinite_from: tuple[int, ...]

    @property
    def candidates(self) -> int:
        """How many there are."""
        return len(self.squares)

    @property
    def stride(self) -> int:
        """Words of a row of :func:`choice_rows`."""
        return _stride(self.sets)

    @property
    def excess(self) -> tuple[tuple[int, ...], ...]:
        """``[candidate][code]``, by how much the squared error is larger on the short side, at least 0."""
        return tuple(
            tuple(short - long for short, long in zip(*both, strict=True))
            for both in zip(self.squares, self.long_squares, strict=True)
        )

    @property
    def negative(self) -> int:
        """The word of a row that is all ones if the scale is negative."""
        return 1 + self.sets

    @property
    def ordinary_from(self) -> int:
        """First E8M0 byte with which no group is clamped."""
        return max(self.normal_from)

    @property
    def ordinary_to(self) -> int:
        """First E8M0 byte with which a group may be infinite."""
        return min(self.nonfinite_from)

    @property
    def quads(self) -> int:
        """Loads of four words that a row takes."""
        return -(-(2 + self.sets) // 4)

    @property
    def width(self) -> int:
        """How many columns there are."""
        return len(self.columns)


def _level_sets(rule: Rule) -> list[list[frozenset[int]]]:
    """``[bit][code]``: the candidates whose level on the long side has that bit; bit 3 is level 8."""
    return [
        [
            frozenset(
                number for number, candidate in enumerate(rule.candidates) if candidate.long[code] >> bit & 1
            )
            for code in CODES
        ]
        for bit in range(4)
    ]


def _distinct(sets: list[list[frozenset[int]]]) -> list[frozenset[int]]:
    return sorted({one for row in sets for one in row if one}, key=sorted)


@cache
def choice_rows(rule: Rule) -> npt.NDArray[np.int32]:
    """What a kernel looks up for a choice.

    Returns:
        ``[choices + 1, stride]`` int32: bf16 bits of the scale at exponent 0, sign included; then for each
        set of :attr:`KernelTables.levels` all ones if the choice is in it, else 0. The last row is for groups
        of which nothing is kept.
    """
    sets = _distinct(_level_sets(rule))
    rows = np.zeros((len(rule.options) + 1, _stride(len(sets))), dtype=np.int32)
    for choice, option in enumerate(rule.options):
        rows[choice, 0] = option.bits
        rows[choice, 1 : 1 + len(sets)] = [-(choice // len(rule.signs) in one) for one in sets]
        rows[choice, 1 + len(sets)] = -(option.sign < 0)
    return rows


def _stride(sets: int) -> int:
    # Whole 16-byte loads, and an odd number of them: rows then spread over the banks of a cache.
    return 4 * (-(-(2 + sets) // 4) | 1)


@cache
def kernel_tables(rule: Rule) -> KernelTables:
    """The constants of ``rule``.

    Raises:
        ValueError: more than 16 choices, or errors that a kernel's sums cannot hold exactly.
    """
    choices = len(rule.options)
    if choices > MOST_CHOICES or rule.signs not in ((1,), (1, -1)):
        raise ValueError(f"rule {rule.name} has {choices} choices, a kernel has {MOST_CHOICES}")
    short = [rule.squares(candidate.short_errors)[1:] for candidate in rule.candidates]
    long = [rule.squares(candidate.long_errors)[1:] for candidate in rule.candidates]
    # A kernel sums 16 times the error plus the choice's number in float32. Rounding keeps the order, so the
    # least sum is right if it is exact, and it is if for some candidate no group's sum exceeds 24 bits.
    largest = min(GROUP_SIZE * max(map(max, both)) for both in zip(short, long, strict=True))
    if rule.by_error and MOST_CHOICES * largest + MOST_CHOICES > 1 << 24:
        raise ValueError(f"rule {rule.name} has errors too large for a kernel")

    sets = _level_sets(rule)
    numbers = {one: number for number, one in enumerate(_distinct(sets), start=1)}
    return KernelTables(
        levels=tuple(tuple(numbers.get(one, 0) for one in row) for row in sets[:3]),
        eights=tuple(numbers.get(one, 0) for one in sets[3]),
        squares=tuple(short),
        long_squares=tuple(long),
        sided=tuple(8 in candidate.long for candidate in rule.candidates),
        energies=FOURFOLD_SQUARES[1:],
        signs=len(rule.signs),
        by_error=rule.by_error,
        fraction_bits=rule.fraction_bits,
        dropped_below=rule.dropped_below,
        clamped_offset=rule.clamped_offset,
        normal_from=rule.normal_from[1:],
        columns=columns_of(rule),
        sets=len(numbers),
        split=tuple(code in rule.sided_codes for code in CODES),
        nonfinite_from=NONFINITE_FROM[1:],
    )


def columns_of(rule: Rule) -> tuple[tuple[int, bool], ...]:
    """What of a group decides its largest error: (code, whether negative), one bit of a pattern each.

    A code whose level is the same on both sides, for every candidate, is one column, as if positive.
    """
    return tuple(
        (code, negative) for code in CODES for negative in (False, True)[: 1 + (code in rule.sided_codes)]
    )


@cache
def largest_errors(rule: Rule) -> npt.NDArray[np.int32]:
    """Keys of the largest error of a group, by the columns that stand in it.

    Returns:
        ``[choices + 1, 2^columns]`` int32, see :func:`errors_of`; the last row is for groups of which
        nothing is kept.
    """
    columns = columns_of(rule)
    by_code = [*(option.errors for option in rule.options), MAGNITUDES * 2]
    rows = [[errors[code + 8 * negative] for code, negative in columns] for errors in by_code]
    present = np.arange(1 << len(columns))[:, None] >> np.arange(len(columns)) & 1
    errors = (present * np.array(rows)[:, None, :]).max(axis=-1)
    keys: npt.NDArray[np.int32] = errors.astype(np.float32).view(np.int32) >> _KEY_SHIFT
    assert np.array_equal(errors_of(keys, 0), errors)
    return keys


def errors_of(keys: npt.NDArray[np.int32], bias: int = E8M0_BIAS) -> npt.NDArray[np.float64]:
    """The errors behind keys, integers of the same order as the errors.

    A key holds the upper bits of a float32. Adding an E8M0 byte b at its exponent, ``b << KEY_EXPONENT``,
    multiplies by ``2^b``, beyond float32's range as well; ``bias`` is what b exceeds the exponent by.
    """
    mantissa = 1 + (keys & (1 << KEY_EXPONENT) - 1) / (1 << KEY_EXPONENT)
    exponent = (keys >> KEY_EXPONENT) - _FLOAT32_BIAS - bias
    values: npt.NDArray[np.float64] = np.where(keys > 0, np.ldexp(mantissa, exponent), 0.0)
    return values
