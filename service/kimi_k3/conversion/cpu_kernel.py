# SPDX-License-Identifier: Apache-2.0
"""The conversion of strips of 16 rows on a core, in numba.

A group's 32 nibbles are four 32-bit words. Transposed bit by bit they are four *planes* of one word each,
three of the magnitudes and one of the signs, and what the tables ask for becomes logic on words: where
magnitude m stands, how often, how often with a minus, and the planes of the levels. LLVM vectorises these
loops over groups; a rule's numbers are constants of the code that is compiled for it. Strips of 16 rows pass
one after another through buffers that stay in the second-level cache, so a conversion in place is the same
code.

Why numba: vLLM depends on it, so it is wherever this runs, in the version of requirements.lock. C would need
a compiler on the host or a wheel per platform; torch's inductor needs that compiler as well, and torch.

The first conversion by a rule compiles, 3 to 6 s on one core. Nothing of that is kept on disk: it is short
beside the loading of a model, and a cache needs a place that can be written.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kimi_k3.conversion.candidates import (
    E8M0_BIAS,
    E8M0_NAN,
    FOURFOLD_SQUARES,
    GROUP_SIZE,
    INFINITE_SCALE_BITS,
    MAGNITUDES,
    NAN_SCALE_BITS,
    NONFINITE_FROM,
    ZERO_SCALE_BITS,
)
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
# What a strip's words are, one of each per group: planes of the codes, presence, energy, levels.
_BIT0, _BIT1, _BIT2, _SIGN, _PRESENT, _FOURFOLD_ENERGY, _LEVELS = range(7)


def _compiled(function: _Function) -> _Function:
    # Sums may be reordered: they are exact wherever Tally promises it.
    return cast(_Function, njit(nogil=True, fastmath={"reassoc", "nsz"})(function))


def _inline(function: _Function) -> _Function:
    return cast(_Function, njit(nogil=True, forceinline=True)(function))


class _Tables(NamedTuple):
    """A rule as arrays. An option is a candidate with a sign; behind them come four that keep nothing.

    Attributes:
        zero: the option of groups of zeros; next come those of dropped, infinite and NaN ones.
        forced: ``[8, 256]``, by the largest code and the E8M0 byte, the option; -1 where the errors decide.
        clamped: ``[8, 256]`` bool, whether such a group counts as clamped.
        ordinary: ``[256]`` bool, the E8M0 bytes for which the errors decide unless a group is zero.
        squares: ``[option, 16]`` float64, squared errors by code.
        worst: ``[option, presence]`` float32, the largest error; see :func:`_worst`.
        levels: ``[option]`` uint32, levels of codes 1-7 on the long side, four bits each; bit 31 for a
            negative scale.
        bits: ``[option, 256]`` uint16, of the scale, by the E8M0 byte.
    """

    zero: int
    forced: npt.NDArray[np.int64]
    clamped: npt.NDArray[np.bool_]
    ordinary: npt.NDArray[np.bool_]
    squares: Floats
    worst: npt.NDArray[np.float32]
    levels: Words
    bits: npt.NDArray[np.uint16]


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
    scales = np.array([one.bits for one in options])
    special = np.array([ZERO_SCALE_BITS, ZERO_SCALE_BITS, INFINITE_SCALE_BITS, NAN_SCALE_BITS])
    bits = (scales[:, None] + 128 * (byte - E8M0_BIAS), np.repeat(special[:, None], 256, axis=1))
    levels = [
        sum(level << 4 * code - 4 for code, level in enumerate(one.candidate.long) if code)
        | (one.sign < 0) << 31
        for one in options
    ]
    return _Tables(
        zero=zero,
        forced=forced,
        clamped=clamped,
        ordinary=np.all((forced[1:] < 0) & ~clamped[1:], axis=0),
        squares=errors**2,
        worst=_worst(errors, rule.sided_codes),
        levels=np.array([*levels, 0, 0, 0, 0], np.uint32),
        bits=(np.concatenate(bits) & 0xFFFF).astype(np.uint16),
    )


def _worst(errors: Floats, sided: tuple[int, ...]) -> npt.NDArray[np.float32]:
    # A presence says which codes a group has. Bits 0-6: codes 1-7, of a sided code the positive ones. From
    # bit 7 on: negative ones of sided codes, 7 first, for these are the largest and the table stays small.
    lowest = min(sided, default=8)
    presence = np.arange(1 << (7 + 8 - lowest))
    worst = np.zeros((len(errors), len(presence)))
    for code in range(1, 8):
        positive, negative = errors[:, code, None], errors[:, 8 + code, None]
        if code in sided:
            worst = np.maximum(worst, negative * (presence >> (14 - code) & 1))
        worst = np.maximum(worst, positive * (presence >> (code - 1) & 1))
    return worst.astype(np.float32)


def _generate_popcount(_: Any, word: Any) -> Any:
    return types.uint32(types.uint32), lambda context, builder, signature, arguments: builder.ctpop(
        *arguments
    )


def _generate_spread(_: Any, word: Any, bit: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        top = arguments[0].type(31)
        return builder.ashr(builder.shl(arguments[0], builder.sub(top, arguments[1])), top)

    return types.uint32(types.uint32, types.uint32), generate


# numba computes with 64 bits wherever it can, which costs half of a vector's lanes.
_popcount = intrinsic(_generate_popcount)
_spread = intrinsic(_generate_spread)  # A word of copies of one bit.


@_inline
def _swap(a: np.uint32, b: np.uint32, shift: np.uint32, mask: np.uint32) -> tuple[np.uint32, np.uint32]:
    changed = ((a >> shift) ^ b) & mask
    return np.uint32(a ^ (changed << shift)), np.uint32(b ^ changed)


@_inline
def _transpose(a: np.uint32, b: np.uint32, c: np.uint32, d: np.uint32) -> tuple[np.uint32, ...]:
    """Bit i of each nibble of word j becomes bit j of that nibble of word i; its own inverse."""
    one, two = np.uint32(1), np.uint32(2)
    a, b = _swap(a, b, one, np.uint32(0x55555555))
    c, d = _swap(c, d, one, np.uint32(0x55555555))
    a, c = _swap(a, c, two, np.uint32(0x33333333))
    b, d = _swap(b, d, two, np.uint32(0x33333333))
    return a, b, c, d


@_inline
def _masks(b0: np.uint32, b1: np.uint32, b2: np.uint32) -> tuple[np.uint32, ...]:
    """Where the codes 1-7 stand."""
    return (
        np.uint32(b0 & ~b1 & ~b2),
        np.uint32(~b0 & b1 & ~b2),
        np.uint32(b0 & b1 & ~b2),
        np.uint32(~b0 & ~b1 & b2),
        np.uint32(b0 & ~b1 & b2),
        np.uint32(~b0 & b1 & b2),
        np.uint32(b0 & b1 & b2),
    )


@_inline
def _counts(masks: tuple[np.uint32, ...], side: np.uint32) -> tuple[np.uint32, ...]:
    return (
        _popcount(masks[0] & side),
        _popcount(masks[1] & side),
        _popcount(masks[2] & side),
        _popcount(masks[3] & side),
        _popcount(masks[4] & side),
        _popcount(masks[5] & side),
        _popcount(masks[6] & side),
    )


def _least_key(rule: Rule) -> tuple[Any, Any, int]:
    """The choice by error, as straight code without the terms that are 0.

    Returns:
        A function of the counts of codes 1-7, and of the negative ones among them, that gives the least key,
        ``squared error << shift | option``; the key's numpy type; and the shift.
    """
    options = [
        (number, rule.squares(one.candidate.short_errors), rule.squares(one.candidate.long_errors), one.sign)
        for number, one in enumerate(rule.options)
        # The same errors with another sign would not win.
        if rule.by_error and (number % len(rule.signs) == 0 or one.candidate.short != one.candidate.long)
    ]
    # Keys also hold the options that keep nothing.
    shift = (len(rule.options) + 3).bit_length()
    most = max((GROUP_SIZE * max(*short, *long) for _, short, long, _ in options), default=0) << shift
    assert most < 2**63
    key = types.uint32 if most < 2**31 else types.uint64

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = context.get_value_type(key)

        def counts(argument: Any) -> list[Any]:
            values = cgutils.unpack_tuple(builder, argument)
            return values if key is types.uint32 else [builder.zext(value, word) for value in values]

        def add(total: Any, count: Any, weight: int) -> Any:
            return builder.add(total, builder.mul(count, word(weight << shift))) if weight else total

        every, negative = counts(arguments[0]), counts(arguments[1])
        least = word(0)
        for option, short, long, sign in options:
            value = word(0)
            for code in range(1, 8):
                value = add(value, every[code - 1], short[code])
            for code in range(1, 8):
                if long[code] != short[code]:
                    below = negative[code - 1]
                    side = below if sign > 0 else builder.sub(every[code - 1], below)
                    value = add(value, side, long[code] - short[code])
            value = builder.add(value, word(option))
            better = builder.icmp_unsigned("<", value, least)
            least = builder.select(better, value, least) if option else value
        return least

    def typed(_: Any, every: Any, negative: Any) -> Any:
        return key(every, negative), generate

    return intrinsic(typed), getattr(np, key.name), shift


@cache
def strips_kernel(rule: Rule) -> Callable[..., None]:
    """The kernel of a rule, for what :func:`cpu.convert` gives it; compiled when it is first called."""
    zero, forced, clamped, ordinary, squares, worst, levels, bits = _tables(rule)
    units = 2.0 ** (np.arange(256) - E8M0_BIAS)
    # One bit for each, since numba tests a constant's bits while it compiles.
    sided = sum(1 << code for code in rule.sided_codes)
    least_key, key_type, shift = _least_key(rule)
    signed = np.int32 if key_type is np.uint32 else np.int64
    option_mask = (1 << shift) - 1
    square_unit = 4.0**-rule.fraction_bits
    e1, e2, e3, e4, e5, e6, e7 = FOURFOLD_SQUARES[1:]

    @_inline
    def presence(masks: tuple[np.uint32, ...], sign: np.uint32) -> np.uint32:
        word = np.uint32(0)
        for code in range(1, 8):
            mask = masks[code - 1]
            if sided >> code & 1:
                word |= np.uint32(np.uint32((mask & sign) != 0) << np.uint32(14 - code))
                mask = np.uint32(mask & ~sign)
            word |= np.uint32(np.uint32(mask != 0) << np.uint32(code - 1))
        return word

    @_compiled
    def choose(nibbles: Words, words: Words, keys: Any) -> None:
        for i in range(len(keys)):
            j = 4 * i
            b0, b1, b2, sign = _transpose(nibbles[j], nibbles[j + 1], nibbles[j + 2], nibbles[j + 3])
            words[_BIT0, i], words[_BIT1, i], words[_BIT2, i], words[_SIGN, i] = b0, b1, b2, sign
            masks = _masks(b0, b1, b2)
            n = _counts(masks, _ALL)
            keys[i] = least_key(n, _counts(masks, sign))
            words[_PRESENT, i] = presence(masks, sign)
            words[_FOURFOLD_ENERGY, i] = (
                n[0] * e1 + n[1] * e2 + n[2] * e3 + n[3] * e4 + n[4] * e5 + n[5] * e6 + n[6] * e7
            )

    @_compiled
    def settle(i: int, octet: int, words: Words, keys: Any, counts: Any, sums: Floats) -> None:
        """Choose for a group that the errors alone do not decide, and see to its figures."""
        masks = _masks(words[_BIT0, i], words[_BIT1, i], words[_BIT2, i])
        every, negative = _counts(masks, _ALL), _counts(masks, words[_SIGN, i])
        largest = 0
        for code in range(1, 8):
            if every[code - 1]:
                largest = code
        option = forced[largest, octet]
        if option < 0:
            option = np.int64(keys[i] & option_mask)
        error = 0.0
        for code in range(1, 8):
            below = np.int64(negative[code - 1])
            error += (every[code - 1] - below) * squares[option, code] + below * squares[option, 8 + code]
        sums[SQUARED_ERROR] += error * units[octet] * units[octet]
        # Later sums find no error here and count the group as lossless.
        keys[i] = option
        if option > zero + 1:
            words[_FOURFOLD_ENERGY, i] = 0
            counts[NONFINITE] += 1
        if option > zero + 1 or error > 0:
            counts[LOSSLESS] -= 1
        counts[ZERO] += option == zero
        counts[CLAMPED] += clamped[largest, octet]

    @_compiled
    def settle_all(octets: Octets, words: Words, keys: Any, counts: Any, sums: Floats) -> None:
        for i in range(len(keys)):
            if not (ordinary[octets[i]] and words[_PRESENT, i]):
                settle(i, octets[i], words, keys, counts, sums)

    @_compiled
    def look_up(octets: Octets, words: Words, keys: Any, unit: Floats, scales: Any, sums: Floats) -> None:
        most = 0.0
        for i in range(len(keys)):
            option = np.uint32(keys[i] & option_mask)
            words[_LEVELS, i] = levels[option]
            unit[i] = units[octets[i]]
            scales[i] = bits[option, octets[i]]
            error = worst[option, words[_PRESENT, i]] * unit[i]
            if error > most:
                most = error
        sums[MAX_ERROR] = most

    @_compiled
    def sum_up(words: Words, keys: Any, unit: Floats, counts: Any, sums: Floats) -> None:
        squared_error = 0.0
        total = 0.0
        lossless = 0
        for i in range(len(keys)):
            square = unit[i] * unit[i]
            error = keys[i] >> key_type(shift)
            # A conversion of signed numbers exists in AVX2.
            squared_error += signed(error) * square
            total += np.int32(words[_FOURFOLD_ENERGY, i]) * square
            lossless += error == 0
        sums[SQUARED_ERROR] += squared_error * square_unit
        sums[ENERGY] = total / 4
        counts[LOSSLESS] += lossless

    @_compiled
    def write(words: Words, nibbles: Words) -> None:
        for i in range(len(nibbles) // 4):
            level = words[_LEVELS, i]
            masks = _masks(words[_BIT0, i], words[_BIT1, i], words[_BIT2, i])
            p0 = p1 = p2 = p3 = np.uint32(0)
            for code in range(1, 8):
                mask = masks[code - 1]
                p0 |= mask & _spread(level, 4 * code - 4)
                p1 |= mask & _spread(level, 4 * code - 3)
                p2 |= mask & _spread(level, 4 * code - 2)
                if sided >> code & 1:
                    p3 |= mask & _spread(level, 4 * code - 1)
            # The long side, where 8 stands, is the negative one of the levels; on the other, 8 becomes 7.
            side = words[_SIGN, i] ^ _spread(level, 31)
            most = p3 & ~side
            p0 |= most
            p1 |= most
            p2 |= most
            # Two's complement: in four bits, 8 is -8.
            p3 = side & (p0 | p1 | p2 | p3)
            p2 ^= side & (p0 | p1)
            p1 ^= side & p0
            a, b, c, d = _transpose(np.uint32(p0), np.uint32(p1), np.uint32(p2), np.uint32(p3))
            j = 4 * i
            nibbles[j], nibbles[j + 1], nibbles[j + 2], nibbles[j + 3] = a, b, c, d

    @_compiled
    def convert_strips(
        packed: Pairs,
        e8m0: Octets,
        out: Pairs,
        scales: Any,
        counts: Any,
        sums: Floats,
        rows: int,
        groups: int,
        aiter: bool,
        first: int,
        last: int,
    ) -> None:
        most = STRIP_ROWS * groups
        words = np.empty((_LEVELS + 1, most), np.uint32)
        keys = np.empty(most, key_type)
        unit = np.empty(most, np.float64)
        pairs = np.empty(2 * most, np.uint64)
        bits = np.empty(most, np.uint16)
        sorted_scales = np.empty((groups // 2, STRIP_ROWS), np.uint32)
        strips = (rows + STRIP_ROWS - 1) // STRIP_ROWS
        for strip in range(first, last):
            expert = strip // strips
            row = strip % strips * STRIP_ROWS
            start = (expert * rows + row) * groups
            size = min(STRIP_ROWS, rows - row) * groups
            stop = start + size
            source, octet = packed[2 * start : 2 * stop], e8m0[start:stop]
            target, scale = out[2 * start : 2 * stop], scales[start:stop]
            if aiter:
                target, scale = pairs, bits
            key, count, total = keys[:size], counts[strip], sums[strip]
            choose(source.view(np.uint32), words, key)
            settle_all(octet, words, key, count, total)
            look_up(octet, words, key, unit, scale, total)
            sum_up(words, key, unit, count, total)
            write(words, target[: 2 * size].view(np.uint32))
            if aiter:
                _scatter_words(pairs, groups, out[2 * start : 2 * stop])
                matrix = scales[expert * rows * groups : (expert + 1) * rows * groups].view(np.uint32)
                scale_pairs = bits.view(np.uint32).reshape(STRIP_ROWS, groups // 2)
                _scatter_scales(scale_pairs, sorted_scales, row, matrix.reshape(groups // 2, rows))

    return convert_strips


@_compiled
def _scatter_words(pairs: Pairs, groups: int, out: Pairs) -> None:
    """Interleave the nibbles of each word, by two exchanges, then the halves of a strip's groups."""
    outer, inner = np.uint64(0x0000FF000000FF00), np.uint64(0x00F000F000F000F0)
    eight, four = np.uint64(8), np.uint64(4)
    for i in range(len(pairs)):
        pair = pairs[i]
        changed = (pair ^ (pair >> eight)) & outer
        pair ^= changed ^ (changed << eight)
        changed = (pair ^ (pair >> four)) & inner
        pairs[i] = pair ^ changed ^ (changed << four)
    source, target = pairs.reshape(STRIP_ROWS, groups, 2), out.reshape(groups, 2, STRIP_ROWS)
    for group in range(groups):
        for row in range(STRIP_ROWS):
            target[group, 0, row] = source[row, group, 0]
            target[group, 1, row] = source[row, group, 1]


@_compiled
def _scatter_scales(scales: Words, sorted_scales: Words, first: int, out: Words) -> None:
    """Write a strip's pairs of scales, ``[rows, G / 2]``, to rows ``first`` ... of ``[G / 2, N]``."""
    for pair in range(scales.shape[1]):
        for row in range(STRIP_ROWS):
            sorted_scales[pair, row] = scales[row, pair]
    # Each of these runs is a cache line of another page. In few stores, more of them are under way at once.
    for pair in range(scales.shape[1]):
        for row in range(STRIP_ROWS):
            out[pair, first + row] = sorted_scales[pair, row]
