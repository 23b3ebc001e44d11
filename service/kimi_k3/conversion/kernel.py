# SPDX-License-Identifier: Apache-2.0
"""The conversion as a Triton kernel: one pass that reads every weight once, out of place or in place.

:mod:`kernel_groups` converts a group; this decides which thread has which. Threads are laid out over the
strip of 16 rows that AITER interleaves so that reads fill whole 32-byte sectors and writes whole lines
without an exchange between threads. In place, a program loads all words of its strips before it stores one,
and the stores depend on a sum over what was loaded.

Groups that are not ordinary, tiny or not finite, are left to a second launch with ``ORDINARY`` off: the first
one reports a part that holds such a group, and in place does not store it.

The constant 15 is an argument on purpose, as the masks of bits are. If Triton knew how the threads' places
are made it would lay the tensors out anew for every access.
"""

import triton
import triton.language as tl

from kimi_k3.conversion.kernel_groups import convert_groups, split_words

ROW_MASK = 15
"""Argument ``fifteen``: the row of a thread in its strip."""

FLAG_BITS = 16
"""Of each count in ``flags_out``: lossless, zero, non-finite and clamped groups, from the lowest bits."""


@triton.jit
def _load_words(packed, group):
    return split_words(tl.load(packed + group[:, None] * 4 + tl.arange(0, 4)[None, :]))


@triton.jit
def _store_words(out, target, words, half: tl.constexpr, good):
    """Store a group's two halves of two words each, ``half`` words apart."""
    place = target[:, None] + tl.arange(0, 2)[None, :]
    tl.store(out + place, tl.join(words[0], words[1]).to(tl.int32, bitcast=True), mask=good[:, None])
    tl.store(out + place + half, tl.join(words[2], words[3]).to(tl.int32, bitcast=True), mask=good[:, None])


@triton.jit
def _widened(flags):
    """Four counts of 8 bits, as 16 bits each in two words."""
    return (flags & 0xFF) | ((flags & 0xFF00) << 8), ((flags >> 16) & 0xFF) | ((flags >> 8) & 0xFF0000)


@triton.jit
def _offset(chunk, round_step, chunk_step, ROW_CHUNKS: tl.constexpr):
    """Where a chunk begins, counted from the part's first: its round, and its place in the row."""
    return chunk // ROW_CHUNKS * round_step + chunk % ROW_CHUNKS * chunk_step


@triton.jit
def _add(flags, square, energy, error, found):
    """A thread's figures, and those of one more group."""
    return flags + found[0], square + found[1], energy + found[2], tl.maximum(error, found[3])


@triton.jit
def _together(low, high, square, energy, error, low_2, high_2, square_2, energy_2, error_2):
    """Figures of two sets of groups as those of both."""
    return low + low_2, high + high_2, square + square_2, energy + energy_2, tl.maximum(error, error_2)


@triton.jit
def convert_parts(
    packed,
    e8m0,
    out,
    scales,
    choices_table,
    error_table,
    flags_out,
    square_out,
    energy_out,
    error_out,
    unusual_parts,
    rows,
    allowed,
    mask_0,
    mask_1,
    mask_2,
    mask_3,
    fifteen,
    TABLES: tl.constexpr,
    GROUPS: tl.constexpr,
    STRIPS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROUNDS: tl.constexpr,
    AITER: tl.constexpr,
    IN_PLACE: tl.constexpr,
    ORDINARY: tl.constexpr,
    PTX: tl.constexpr,
):
    """Convert ``ROUNDS * STRIPS`` strips of 16 rows; a program is a part of :class:`loss.Tally`.

    Args:
        packed: ``[E, rows, 4 * GROUPS]`` int32 words of MXFP4.
        e8m0: ``[E, rows, GROUPS]`` uint8.
        out: int32 words of int4; ``packed`` itself if ``IN_PLACE``.
        scales: uint16, bf16 bits in the layout's order.
        choices_table: :func:`kernel_tables.choice_rows`.
        error_table: :func:`kernel_tables.largest_errors`.
        flags_out: ``[parts]`` int64, see :data:`FLAG_BITS`. With ``ORDINARY`` the third count is that of
            groups that are not ordinary; if it is not 0 nothing else of the part holds, and in place it is
            not stored.
        square_out: ``[parts]`` float64; so ``energy_out``.
        error_out: ``[parts]`` int32, see :func:`kernel_tables.errors_of`.
        unusual_parts: without ``ORDINARY``, the parts to convert.
        rows: of an expert.
        allowed: how many non-finite groups a part may hold and still be stored.
        mask_0: and so on, :data:`kernel_groups.BIT_MASKS`.
        fifteen: :data:`ROW_MASK`.
        TABLES: the rule's :class:`kernel_tables.KernelTables`.
        GROUPS: of a row, a multiple of ``2 * PAIRS``.
        STRIPS: how many are converted at once, a power of two.
        PAIRS: pairs of groups of a row that are converted at once, a power of two; 32 threads for each.
        ROUNDS: how many times so many strips make a part.
        AITER: the layout, else plain.
        IN_PLACE: whether all words must be loaded before one is stored.
        ORDINARY: whether this is the first launch.
        PTX: whether this is compiled for NVIDIA.
    """
    ROW_CHUNKS: tl.constexpr = GROUPS // (2 * PAIRS)
    CHUNKS: tl.constexpr = ROUNDS * ROW_CHUNKS
    bit_masks = (
        mask_0.to(tl.uint32, bitcast=True),
        mask_1.to(tl.uint32, bitcast=True),
        mask_2.to(tl.uint32, bitcast=True),
        mask_3.to(tl.uint32, bitcast=True),
    )
    part = tl.program_id(0)
    if not ORDINARY:
        part = tl.load(unusual_parts + part)
    part_rows: tl.constexpr = ROUNDS * STRIPS * 16
    expert = part // (rows // part_rows)
    expert_row = (part - expert * (rows // part_rows)) * part_rows
    first_row = part.to(tl.int64) * part_rows
    packed += first_row * (GROUPS * 4)
    e8m0 += first_row * GROUPS
    out += first_row * (GROUPS * 4)

    # A thread's place: two groups of a pair, sixteen rows of a strip, pairs, strips.
    thread = tl.arange(0, STRIPS * PAIRS * 32)
    odd = (thread & fifteen) % 2
    row = (thread >> 1) & fifteen
    pair = (thread >> 5) % PAIRS
    strip = (thread >> 5) // PAIRS
    source = (strip * 16 + row) * GROUPS + 2 * pair + odd
    if AITER:
        half: tl.constexpr = 32
        target = strip * (64 * GROUPS) + (2 * pair + odd) * 64 + row * 2
        target_step: tl.constexpr = 128 * PAIRS
        scale_round: tl.constexpr = STRIPS * 32
        scales += (first_row - expert_row) * GROUPS + expert_row * 2
        scale_target = pair * (2 * rows) + (strip * 16 + row) * 2 + odd
        scale_step = 2 * PAIRS * rows
    else:
        half: tl.constexpr = 2
        target = source * 4
        target_step: tl.constexpr = 8 * PAIRS
        scale_round: tl.constexpr = STRIPS * 16 * GROUPS
        scales += first_row * GROUPS
        scale_target = source
        scale_step = 2 * PAIRS

    # Between rounds, and between chunks of a row, in groups; words of the output, and scales.
    source_round: tl.constexpr = STRIPS * 16 * GROUPS
    target_round: tl.constexpr = STRIPS * 64 * GROUPS
    flags = tl.zeros(thread.shape, tl.int32)
    square = tl.zeros(thread.shape, tl.float64)
    energy = tl.zeros(thread.shape, tl.float64)
    error = tl.zeros(thread.shape, tl.int32)
    if IN_PLACE:
        loaded = ()
        for chunk in tl.static_range(CHUNKS):
            loaded = loaded + (
                _load_words(packed, source + _offset(chunk, source_round, 2 * PAIRS, ROW_CHUNKS)),
            )
        kept = ()
        for chunk in tl.static_range(CHUNKS):
            byte = tl.load(e8m0 + source + _offset(chunk, source_round, 2 * PAIRS, ROW_CHUNKS))
            words, scale, found = convert_groups(
                loaded[chunk],
                byte.to(tl.int32),
                bit_masks,
                choices_table,
                error_table,
                TABLES,
                AITER,
                ORDINARY,
                PTX,
            )
            kept = kept + (words,)
            tl.store(scales + scale_target + _offset(chunk, scale_round, scale_step, ROW_CHUNKS), scale)
            flags, square, energy, error = _add(flags, square, energy, error, found)
    else:
        next_words = _load_words(packed, source)
        next_byte = tl.load(e8m0 + source)
        for chunk in tl.range(CHUNKS):
            words, byte = next_words, next_byte.to(tl.int32)
            if chunk + 1 < CHUNKS:
                place = source + _offset(chunk + 1, source_round, 2 * PAIRS, ROW_CHUNKS)
                next_words = _load_words(packed, place)
                next_byte = tl.load(e8m0 + place)
            words, scale, found = convert_groups(
                words, byte, bit_masks, choices_table, error_table, TABLES, AITER, ORDINARY, PTX
            )
            words_target = target + _offset(chunk, target_round, target_step, ROW_CHUNKS)
            _store_words(out, words_target, words, half, thread >= 0)
            tl.store(scales + scale_target + _offset(chunk, scale_round, scale_step, ROW_CHUNKS), scale)
            flags, square, energy, error = _add(flags, square, energy, error, found)

    low, high = _widened(flags)
    low, high, square, energy, error = tl.reduce((low, high, square, energy, error), 0, _together)
    tl.store(flags_out + part, low.to(tl.int64) | (high.to(tl.int64) << 32))
    tl.store(square_out + part, square)
    tl.store(energy_out + part, energy)
    tl.store(error_out + part, error)
    if IN_PLACE:
        bad = tl.broadcast_to(high & 0xFFFF, thread.shape)
        for chunk in tl.static_range(CHUNKS):
            words_target = target + _offset(chunk, target_round, target_step, ROW_CHUNKS)
            _store_words(out, words_target, kept[chunk], half, bad <= allowed)
