# SPDX-License-Identifier: Apache-2.0
"""The conversion of parts of a matrix on a core, in numba.

Parts of 16 or more rows pass one after another through buffers that stay in the second-level cache, so a
conversion in place is the same code: :mod:`cpu_choice` decides for all groups of a part, the few that are not
ordinary are settled one by one, levels are looked up for 32 bytes of codes at once, and figures summed up.

Why numba: vLLM depends on it, so it is wherever this runs, in the version of requirements.lock. C would need
a compiler on the host or a wheel per platform; torch's inductor needs that compiler as well, and torch.

The first conversion by a rule compiles, 3 to 6 s on one core. Nothing of that is kept on disk: it is short
beside the loading of a model, and a cache needs a place that can be written.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit

from kimi_k3.conversion.candidates import (
    E8M0_BIAS,
    E8M0_NAN,
    GROUP_SIZE,
    INFINITE_SCALE_BITS,
    MAGNITUDES,
    NAN_SCALE_BITS,
    NONFINITE_FROM,
    ZERO_SCALE_BITS,
)
from kimi_k3.conversion.cpu_choice import LANES, choice
from kimi_k3.conversion.cpu_instructions import power_of_two, rewrite, rewrite_two
from kimi_k3.conversion.layout import STRIP_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kimi_k3.conversion.candidates import Rule

    Octets = npt.NDArray[np.uint8]
    Words = npt.NDArray[np.uint32]
    Pairs = npt.NDArray[np.uint64]
    Floats = npt.NDArray[np.float64]

_Function = TypeVar("_Function", bound="Callable[..., Any]")

_ALL = np.uint32(0xFFFFFFFF)
LOSSLESS, ZERO, NONFINITE, CLAMPED = range(4)
"""Columns of what a kernel counts."""
SQUARED_ERROR, ENERGY, MAX_ERROR = range(3)
"""Columns of what it sums up."""
_GROUP_BYTES = GROUP_SIZE // 2


def _compiled(function: _Function) -> _Function:
    # Sums may be reordered: they are exact wherever Tally promises it.
    return cast(_Function, njit(nogil=True, fastmath={"reassoc", "nsz"})(function))


class _Tables(NamedTuple):
    """A rule as arrays. An option is a candidate with a sign; behind them come four that keep nothing.

    Attributes:
        zero: the option of groups of zeros; next come those of dropped, infinite and NaN ones.
        forced: ``[8, 256]``, by the largest code and the E8M0 byte, the option; -1 where the errors decide.
        clamped: ``[8, 256]`` bool, whether such a group counts as clamped.
        ordinary: the E8M0 bytes of groups that, unless they are zero, have the option of the least key.
        errors: ``[option, 16]`` float64, by code.
        ranked: float64, all errors, the smallest first.
        rows: ``[option, ROW_BYTES]`` uint8, for :func:`rewrite`: levels, int4 in the low bits; the errors'
            places in ``ranked``; and the scales' bits.
    """

    zero: int
    forced: npt.NDArray[np.int64]
    clamped: npt.NDArray[np.bool_]
    ordinary: range
    errors: Floats
    ranked: Floats
    rows: Octets


def _tables(rule: Rule) -> _Tables:
    options = rule.options
    zero, dropped, infinite, nan = range(len(options), len(options) + 4)
    largest, byte = np.arange(8)[:, None], np.arange(256)
    nonfinite = byte >= np.array(NONFINITE_FROM)[:, None]
    clamped = (byte < np.array(rule.normal_from)[:, None]) & ((largest > 0) | nonfinite)
    by_code = np.where(clamped, byte + rule.clamped_offset, np.maximum(largest - 1, 0)) * len(rule.signs)
    forced = np.where(rule.by_error, -1, by_code)
    forced[clamped & (byte < rule.dropped_below)] = dropped
    forced[(largest == 0) & ~nonfinite] = zero
    forced[nonfinite] = infinite
    forced[:, E8M0_NAN] = nan

    nothing = np.zeros(16)
    errors = np.array([*(one.errors for one in options), nothing, MAGNITUDES * 2, nothing, nothing])
    ranked, ranks = np.unique(errors, return_inverse=True)
    assert len(ranked) <= 256
    levels = [*(one.levels for one in options), *[(0,) * 16] * 4]
    scales = np.array([one.bits for one in options])
    special = np.array([ZERO_SCALE_BITS, ZERO_SCALE_BITS, INFINITE_SCALE_BITS, NAN_SCALE_BITS])
    bits = (scales[:, None] + 128 * (byte - E8M0_BIAS), np.repeat(special[:, None], 256, axis=1))
    parts = (
        (np.array(levels) & 15).astype(np.uint8),
        ranks.reshape(errors.shape).astype(np.uint8),
        (np.concatenate(bits) & 0xFFFF).astype(np.uint16).view(np.uint8),
    )
    return _Tables(
        zero=zero,
        forced=forced,
        clamped=clamped,
        ordinary=range(max(rule.normal_from), min(NONFINITE_FROM)),
        errors=errors,
        ranked=ranked,
        rows=np.concatenate(parts, axis=1),
    )


@cache
def parts_kernel(rule: Rule) -> Callable[..., None]:
    """The kernel of a rule, for what :func:`cpu.convert` gives it; compiled when it is first called."""
    zero, forced, clamped, ordinary, errors, ranked, option_rows = _tables(rule)
    first_ordinary, last_ordinary = ordinary[0], ordinary[-1]
    choose_one, choose_eight, key_type, shift = choice(rule)
    signed = np.int32 if key_type is np.uint32 else np.int64
    option_mask = (1 << shift) - 1
    square_unit = 4.0**-rule.fraction_bits

    @_compiled
    def choose(nibbles: Words, keys: Any, fourfold: Words) -> None:
        """The keys of groups, and four times their energies."""
        together = len(keys) // LANES * LANES
        for i in range(0, together, LANES):
            choose_eight(nibbles, keys, fourfold, i)
        for i in range(together, len(keys)):
            choose_one(nibbles, keys, fourfold, i)

    @_compiled
    def are_ordinary(octets: Octets, fourfold: Words) -> bool:
        lowest, highest, least = np.uint8(255), np.uint8(0), _ALL
        for i in range(len(octets)):
            lowest = min(lowest, octets[i])
            highest = max(highest, octets[i])
            least = min(least, fourfold[i])
        return bool(first_ordinary <= lowest and highest <= last_ordinary and least > 0)

    @_compiled
    def settle(
        i: int, octet: int, codes: Octets, keys: Any, fourfold: Words, counts: Any, sums: Floats
    ) -> None:
        """Choose for a group that is not ordinary, and see to its figures."""
        largest = 0
        if fourfold[i]:
            for byte in codes:
                largest = max(largest, byte & 7, byte >> 4 & 7)
        option = forced[largest, octet]
        if option < 0:
            option = np.int64(keys[i] & option_mask)
        error = 0.0
        if largest:
            for byte in codes:
                error += errors[option, byte & 15] ** 2 + errors[option, byte >> 4] ** 2
        sums[SQUARED_ERROR] += error * power_of_two(2 * (octet - E8M0_BIAS))
        # Later sums find no error here and count the group as lossless.
        keys[i] = option
        if option > zero + 1:
            fourfold[i] = 0
            counts[NONFINITE] += 1
        if option > zero + 1 or error > 0:
            counts[LOSSLESS] -= 1
        counts[ZERO] += option == zero
        counts[CLAMPED] += clamped[largest, octet]

    @_compiled
    def write(
        codes: Octets,
        octets: Octets,
        keys: Any,
        target: Octets,
        scales: Any,
        rows: Octets,
        largest: Octets,
        sums: Floats,
    ) -> None:
        """Levels and scales; and the largest error, of each octet first, for there ranks compare errors."""
        pairs = len(keys) // 2
        for pair in range(pairs):
            i = 2 * pair
            octet, option = np.int64(octets[i]), np.int64(keys[i] & option_mask)
            next_octet, next_option = np.int64(octets[i + 1]), np.int64(keys[i + 1] & option_mask)
            rewrite_two(codes, target, scales, rows, largest, i, (option, next_option), (octet, next_octet))
        for i in range(2 * pairs, len(keys)):
            octet, option = np.int64(octets[i]), np.int64(keys[i] & option_mask)
            rewrite(codes, target, scales, rows, largest, i, option, octet)
        most = 0.0
        seen = largest.view(np.uint64)
        for byte in range(len(seen)):
            if seen[byte, 0] | seen[byte, 1] | seen[byte, 2] | seen[byte, 3]:
                most = max(most, ranked[largest[byte].max()] * power_of_two(byte - E8M0_BIAS))
                seen[byte] = 0
        sums[MAX_ERROR] = most

    @_compiled
    def sum_up(octets: Octets, keys: Any, fourfold: Words, counts: Any, sums: Floats) -> None:
        squared_error = 0.0
        total = 0.0
        lossless = 0
        for i in range(len(keys)):
            square = power_of_two(2 * np.int64(octets[i]) - 2 * E8M0_BIAS)
            error = keys[i] >> key_type(shift)
            # A conversion of signed numbers exists in AVX2.
            squared_error += signed(error) * square
            total += np.int32(fourfold[i]) * square
            lossless += error == 0
        sums[SQUARED_ERROR] += squared_error * square_unit
        sums[ENERGY] = total / 4
        counts[LOSSLESS] += lossless

    @_compiled
    def convert_parts(
        packed: Octets,
        e8m0: Octets,
        out: Octets,
        scales: Any,
        counts: Any,
        sums: Floats,
        rows: int,
        groups: int,
        part_rows: int,
        aiter: bool,
        first: int,
        last: int,
    ) -> None:
        most = part_rows * groups
        keys = np.empty(most, key_type)
        fourfold = np.empty(most, np.uint32)
        largest = np.zeros((256, 2 * _GROUP_BYTES), np.uint8)
        plain = np.empty(_GROUP_BYTES * most, np.uint8)
        plain_scales = np.empty(most, np.uint16)
        sorted_scales = np.empty((groups // 2, part_rows), np.uint32)
        # LLVM addresses a constant anew, in a register, for every place in it that is looked at.
        table = option_rows.copy()
        parts = (rows + part_rows - 1) // part_rows
        for part in range(first, last):
            expert = part // parts
            row = part % parts * part_rows
            start = (expert * rows + row) * groups
            size = min(part_rows, rows - row) * groups
            stop = start + size
            source, octets = packed[_GROUP_BYTES * start : _GROUP_BYTES * stop], e8m0[start:stop]
            target = out[_GROUP_BYTES * start : _GROUP_BYTES * stop]
            level, scale = (plain, plain_scales) if aiter else (target, scales[start:stop])
            key, energy, count, total = keys[:size], fourfold[:size], counts[part], sums[part]
            choose(source.view(np.uint32), key, energy)
            if not are_ordinary(octets, energy):
                for i in range(size):
                    if not (first_ordinary <= octets[i] <= last_ordinary and energy[i]):
                        group = source[_GROUP_BYTES * i : _GROUP_BYTES * (i + 1)]
                        settle(i, octets[i], group, key, energy, count, total)
            write(source, octets, key, level, scale, table, largest, total)
            sum_up(octets, key, energy, count, total)
            if aiter:
                _scatter_words(level[: _GROUP_BYTES * size].view(np.uint64), groups, target.view(np.uint64))
                matrix = scales[expert * rows * groups : (expert + 1) * rows * groups].view(np.uint32)
                pairs = scale[:size].view(np.uint32).reshape(size // groups, groups // 2)
                _scatter_scales(pairs, sorted_scales, row, matrix.reshape(groups // 2, rows))

    return convert_parts


@_compiled
def _scatter_words(pairs: Pairs, groups: int, out: Pairs) -> None:
    """Interleave the nibbles of each word, by two exchanges, then the rows of each strip."""
    outer, inner = np.uint64(0x0000FF000000FF00), np.uint64(0x00F000F000F000F0)
    eight, four = np.uint64(8), np.uint64(4)
    for i in range(len(pairs)):
        pair = pairs[i]
        changed = (pair ^ (pair >> eight)) & outer
        pair ^= changed ^ (changed << eight)
        changed = (pair ^ (pair >> four)) & inner
        pairs[i] = pair ^ changed ^ (changed << four)
    strips = len(pairs) // (STRIP_ROWS * groups * 2)
    source = pairs.reshape(strips, STRIP_ROWS, groups, 2)
    target = out.reshape(strips, groups, 2, STRIP_ROWS)
    for strip in range(strips):
        for group in range(groups):
            for row in range(STRIP_ROWS):
                target[strip, group, 0, row] = source[strip, row, group, 0]
                target[strip, group, 1, row] = source[strip, row, group, 1]


@_compiled
def _scatter_scales(scales: Words, sorted_scales: Words, first: int, out: Words) -> None:
    """Write a part's pairs of scales, ``[rows, G / 2]``, to rows ``first`` ... of ``[G / 2, N]``."""
    rows, pairs = scales.shape
    for pair in range(pairs):
        for row in range(rows):
            sorted_scales[pair, row] = scales[row, pair]
    # Each of these runs is on another page. In few stores, more of them are under way at once.
    for pair in range(pairs):
        for row in range(rows):
            out[pair, first + row] = sorted_scales[pair, row]
