# SPDX-License-Identifier: Apache-2.0
"""One group per thread, in Triton: what converts 32 weights once they are in registers.

A group of 32 weights moves 35 bytes (16 + 1 read, 16 + 2 written), so what counts is how few instructions it
takes.

* A group's four words of eight nibbles are transposed into four *bit planes* of 32 bits, in which one logical
  instruction works on all 32 codes. Counting the codes is a population count each.
* The squared error of a candidate is a sum over these counts, in float32; the least one is exact: see
  :func:`kernel_tables.kernel_tables`. The number of the choice is added to 16 times the error, so one minimum
  finds both.
* Levels are unions of the codes' planes; which ones is looked up by choice.

The masks of bits are arguments and not constants on purpose. A compiler that knows a mask takes a selection
of bits apart into two ands and an or; one that does not keeps it as one instruction (LOP3, v_bfi_b32).
"""

import triton
import triton.language as tl

from kimi_k3.conversion.candidates import (
    E8M0_BIAS,
    E8M0_NAN,
    INFINITE_SCALE_BITS,
    NAN_SCALE_BITS,
    ZERO_SCALE_BITS,
)
from kimi_k3.conversion.kernel_tables import KEY_EXPONENT

_NAN_BYTE = tl.constexpr(E8M0_NAN)
_BIAS = tl.constexpr(E8M0_BIAS)
_NAN_SCALE = tl.constexpr(NAN_SCALE_BITS)
_INFINITE_SCALE = tl.constexpr(INFINITE_SCALE_BITS)
_ZERO_SCALE = tl.constexpr(ZERO_SCALE_BITS)
_KEY_EXPONENT = tl.constexpr(KEY_EXPONENT)
#: A key larger than any of a choice.
_NO_CHOICE = tl.constexpr(0x7F000000)

BIT_MASKS = (0x55555555, 0x33333333, 0xF00FF00F - (1 << 32), 0x00F000F0)
"""The masks that :func:`convert_groups` is given: every other bit, every other pair, the outer nibbles
of each half, and the second."""


@triton.constexpr_function
def _entry(tables, name, *indices):
    """An entry of the tables, while the kernel is compiled."""
    value = getattr(tables, name)
    for index in indices:
        value = value[index]
    return value


@triton.jit
def _select(mask, a, b):
    """Bits of ``a`` inside ``mask``, of ``b`` outside."""
    return (a & mask) | (b & ~mask)


@triton.jit
def _exchange(a, b, shift: tl.constexpr, mask):
    """Swap the bits of ``a`` outside ``mask`` with those of ``b`` inside it."""
    return _select(mask, a, b << shift), _select(mask, a >> shift, b)


@triton.jit
def _transpose(a, b, c, d, masks):
    """Four words of eight nibbles <-> four bit planes of 32 codes; its own inverse."""
    a, b = _exchange(a, b, 1, masks[0])
    c, d = _exchange(c, d, 1, masks[0])
    a, c = _exchange(a, c, 2, masks[1])
    b, d = _exchange(b, d, 2, masks[1])
    return a, b, c, d


@triton.jit
def _interleave(word, masks, PTX: tl.constexpr):
    """A word's nibbles in the order 0, 4, 1, 5, 2, 6, 3, 7."""
    # The middle bytes change places: one instruction. AMD's compiler finds it by itself, NVIDIA's does not.
    if PTX:
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x3120;", "=r,r", [word], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        word = (word & 0xFF0000FF) | ((word >> 8) & 0xFF00) | ((word << 8) & 0xFF0000)
    return _select(masks[2], word, _select(masks[3], word >> 4, word << 4))


@triton.jit
def _count(mask):
    """How many bits are set. The compilers know this idiom and make one instruction of it."""
    mask = mask - ((mask >> 1) & 0x55555555)
    mask = (mask & 0x33333333) + ((mask >> 2) & 0x33333333)
    mask = (mask + (mask >> 4)) & 0x0F0F0F0F
    return ((mask * 0x01010101) >> 24).to(tl.float32)


@triton.jit
def split_words(quad):
    """The four columns of ``[T, 4]`` words."""
    even, odd = tl.split(tl.reshape(quad.to(tl.uint32, bitcast=True), [quad.shape[0], 2, 2]))
    word_0, word_2 = tl.split(even)
    word_1, word_3 = tl.split(odd)
    return word_0, word_1, word_2, word_3


@triton.jit
def _add_member(plane, mask, row, number: tl.constexpr):
    """``plane | mask`` where the choice is in set ``number``; none is in set 0."""
    if number == 0:
        return plane
    else:
        return plane | (mask & row[number])


@triton.jit
def _count_codes(masks, sign, TABLES: tl.constexpr):
    """How often each code occurs: in all; and, for codes whose side matters, with each sign."""
    counts = ()
    positives = ()
    negatives = ()
    for code in tl.static_range(7):
        counts = counts + (_count(masks[code]),)
        negative = counts[code]
        positive = counts[code]
        if _entry(TABLES, "split", code):
            negative = _count(masks[code] & sign)
            positive = counts[code] - negative
        positives = positives + (positive,)
        negatives = negatives + (negative,)
    return counts, positives, negatives


@triton.jit
def _energy(counts, TABLES: tl.constexpr):
    """Four times the sum of squared magnitudes."""
    energy = tl.zeros_like(counts[0])
    for code in tl.static_range(7):
        energy = tl.fma(counts[code], 1.0 * _entry(TABLES, "energies", code), energy)
    return energy


@triton.jit
def _add_errors(total, counts, TABLES: tl.constexpr, name: tl.constexpr, candidate: tl.constexpr):
    """``total`` plus 16 times the squared errors of counted codes, by a candidate's row of the tables.

    Fused operations, since LLVM would make integer multiplications of ``count * constant + total``.
    """
    for code in tl.static_range(7):
        if _entry(TABLES, name, candidate, code) != 0:
            total = tl.fma(counts[code], 16.0 * _entry(TABLES, name, candidate, code), total)
    return total


@triton.jit
def _least_error(counts, positives, negatives, TABLES: tl.constexpr):
    """The choice of least squared error, the first of equals, and that error.

    All are counted as if on the long side, then what it costs more to be on the short one is added.
    """
    SIGNS: tl.constexpr = _entry(TABLES, "signs")
    key = tl.full(counts[0].shape, _NO_CHOICE, tl.int32)
    for candidate in tl.static_range(_entry(TABLES, "candidates")):
        common = tl.zeros_like(counts[0]) + candidate * SIGNS
        common = _add_errors(common, counts, TABLES, "long_squares", candidate)
        total = _add_errors(common, positives, TABLES, "excess", candidate)
        # The bits of floats that are not negative are ordered as they are.
        key = tl.minimum(key, total.to(tl.int32, bitcast=True))
        if SIGNS == 2 and _entry(TABLES, "sided", candidate):
            total = _add_errors(common + 1.0, negatives, TABLES, "excess", candidate)
            key = tl.minimum(key, total.to(tl.int32, bitcast=True))
    whole = key.to(tl.float32, bitcast=True).to(tl.int32)
    return whole & 15, whole >> 4


@triton.jit
def _error_of(choice, counts, TABLES: tl.constexpr):
    """The squared error of a choice that was made otherwise."""
    square = tl.zeros_like(choice)
    for candidate in tl.static_range(_entry(TABLES, "candidates")):
        total = tl.zeros_like(choice)
        for code in tl.static_range(7):
            total += counts[code].to(tl.int32) * _entry(TABLES, "squares", candidate, code)
        square = tl.where(choice == candidate, total, square)
    return square


@triton.jit
def _pattern(positives, negatives, TABLES: tl.constexpr):
    """One bit per column of the tables: whether the group has that code (with that sign).

    Four counts side by side, six bits each, with 31 added: bit 5 of each then says whether it is not 0.
    """
    WIDTH: tl.constexpr = _entry(TABLES, "width")
    pattern = tl.zeros(positives[0].shape, tl.int32)
    for first in tl.static_range(0, WIDTH, 4):
        fields = tl.zeros_like(positives[0]) + 31.0 * (1 + 64 + 4096 + 262144)
        for column in tl.static_range(first, min(first + 4, WIDTH)):
            if _entry(TABLES, "columns", column, 1):
                count = negatives[_entry(TABLES, "columns", column, 0) - 1]
            else:
                count = positives[_entry(TABLES, "columns", column, 0) - 1]
            fields = tl.fma(count, 64.0 ** (column - first), fields)
        there = fields.to(tl.int32).to(tl.uint32, bitcast=True) & 0x00820820
        # Moves the bits 5, 11, 17 and 23 to the top.
        pattern |= ((there * 0x00842100) >> 28).to(tl.int32, bitcast=True) << first
    return pattern


@triton.jit
def _level_planes(masks, sign, row, TABLES: tl.constexpr):
    """The levels of the chosen candidate as four planes of two's complement."""
    below = sign
    if _entry(TABLES, "signs") == 2:
        below = sign ^ row[_entry(TABLES, "negative")]
    ones = tl.zeros_like(sign)
    twos = tl.zeros_like(sign)
    fours = tl.zeros_like(sign)
    eights = tl.zeros_like(sign)
    for code in tl.static_range(7):
        ones = _add_member(ones, masks[code], row, _entry(TABLES, "levels", 0, code))
        twos = _add_member(twos, masks[code], row, _entry(TABLES, "levels", 1, code))
        fours = _add_member(fours, masks[code], row, _entry(TABLES, "levels", 2, code))
        eights = _add_member(eights, masks[code], row, _entry(TABLES, "eights", code))
    # A level of 8 is -8 on the side that is negative and 7 on the other.
    sevens = eights & ~below
    return (
        ones | sevens,
        (twos ^ (below & ones)) | sevens,
        (fours ^ (below & (ones | twos))) | sevens,
        below & (ones | twos | fours | eights),
    )


@triton.jit
def convert_groups(
    words,
    byte,
    bit_masks,
    choices_table,
    error_table,
    TABLES: tl.constexpr,
    AITER: tl.constexpr,
    ORDINARY: tl.constexpr,
    PTX: tl.constexpr,
):
    """Convert one group per thread; ``PTX`` says that NVIDIA's instructions may be named.

    Returns:
        Its four words; bits of the scale; flags of 8 bits each (lossless, zero, non-finite or not ordinary,
        clamped);
        squared error; energy; key of the largest error.
    """
    SIGNS: tl.constexpr = _entry(TABLES, "signs")
    FRACTION_BITS: tl.constexpr = _entry(TABLES, "fraction_bits")
    DROPPED_BELOW: tl.constexpr = _entry(TABLES, "dropped_below")
    NOTHING: tl.constexpr = _entry(TABLES, "candidates") * SIGNS

    one, two, four, sign = _transpose(words[0], words[1], words[2], words[3], bit_masks)
    masks = (
        one & ~two & ~four,
        two & ~one & ~four,
        one & two & ~four,
        four & ~one & ~two,
        one & four & ~two,
        two & four & ~one,
        one & two & four,
    )
    empty = (one | two | four) == 0
    counts, positives, negatives = _count_codes(masks, sign, TABLES)
    if ORDINARY:
        outside = (byte < _entry(TABLES, "ordinary_from")) | (byte >= _entry(TABLES, "ordinary_to"))
        nonfinite = (outside & ~empty) | (byte == _NAN_BYTE)
        zero = empty
    else:
        nonfinite = byte == _NAN_BYTE
        clamped = byte < 0
        for code in tl.static_range(7):
            nonfinite = nonfinite | ((masks[code] != 0) & (byte >= _entry(TABLES, "nonfinite_from", code)))
            clamped = tl.where(masks[code] != 0, byte < _entry(TABLES, "normal_from", code), clamped)
        dropped = clamped & (byte < DROPPED_BELOW)
        zero = empty & ~nonfinite

    if _entry(TABLES, "by_error"):
        choice, square = _least_error(counts, positives, negatives, TABLES)
    else:
        choice = tl.zeros_like(byte)
        for code in tl.static_range(7):
            choice = tl.where(masks[code] != 0, code, choice)
        if not ORDINARY:
            choice = tl.where(clamped & ~dropped, byte + _entry(TABLES, "clamped_offset"), choice)
        square = _error_of(choice, counts, TABLES)
    if not ORDINARY:
        choice = tl.where(nonfinite | dropped, NOTHING, choice)

    error = tl.load(
        error_table + ((choice << _entry(TABLES, "width")) | _pattern(positives, negatives, TABLES))
    )
    error = tl.where(error > 0, error + (byte << _KEY_EXPONENT), 0)
    # 2^(2 * (byte - 127) - 2 * FRACTION_BITS), by its exponent field.
    unit = ((2 * byte + (1023 - 2 * _BIAS - 2 * FRACTION_BITS)).to(tl.int64) << 52).to(
        tl.float64, bitcast=True
    )
    energy = _energy(counts, TABLES).to(tl.float64) * (4.0 ** (FRACTION_BITS - 1)) * unit
    flags = tl.where(square == 0, 1, 0) + tl.where(zero, 1 << 8, 0) + tl.where(nonfinite, 1 << 16, 0)
    square = square.to(tl.uint32, bitcast=True).to(tl.float64) * unit
    if not ORDINARY:
        square = tl.where(nonfinite, 0.0, tl.where(dropped, energy, square))
        energy = tl.where(nonfinite, 0.0, energy)
        error = tl.where(nonfinite, 0, error)
        clamped_flags = (1 << 24) + tl.where(square == 0, 1, 0)
        flags = tl.where(nonfinite, 1 << 16, tl.where(clamped, clamped_flags, flags))

    row = ()
    for quad in tl.static_range(_entry(TABLES, "quads")):
        place = (choice * _entry(TABLES, "stride") + 4 * quad)[:, None] + tl.arange(0, 4)[None, :]
        row = row + split_words(tl.load(choices_table + place))
    scale = row[0].to(tl.int32, bitcast=True) + (byte - _BIAS) * 128
    if ORDINARY:
        scale = tl.where(zero, _ZERO_SCALE, scale)
    else:
        scale = tl.where(zero | dropped, _ZERO_SCALE, scale)
        scale = tl.where(nonfinite, tl.where(byte == _NAN_BYTE, _NAN_SCALE, _INFINITE_SCALE), scale)
    ones, twos, fours, eights = _level_planes(masks, sign, row, TABLES)
    out_0, out_1, out_2, out_3 = _transpose(ones, twos, fours, eights, bit_masks)
    if AITER:
        out_0 = _interleave(out_0, bit_masks, PTX)
        out_1 = _interleave(out_1, bit_masks, PTX)
        out_2 = _interleave(out_2, bit_masks, PTX)
        out_3 = _interleave(out_3, bit_masks, PTX)
    return (out_0, out_1, out_2, out_3), scale.to(tl.uint16), (flags, square, energy, error)
