# SPDX-License-Identifier: Apache-2.0
"""Where nibbles and scales stand: the order that AITER's kernels read, and its inverse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3.conversion.layout import (
    STRIP_ROWS,
    WORDS_PER_GROUP,
    arrange_levels,
    arrange_scales,
    check_shape,
    restore_levels,
    restore_scales,
)
from kimi_k3.conversion.mxfp4 import dequantize_int4, dequantize_mxfp4, pack_nibbles, unpack_nibbles
from kimi_k3.words.weights import Int4Layout

from .groups import GOLDEN_NAMES, golden

PLAIN, AITER = Int4Layout.PLAIN, Int4Layout.AITER
#: Which of a word's eight values stands in its nibble 0, 1, ... 7, as AITER's kernels unpack them.
NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
SIZES = st.integers(1, 4)


@pytest.mark.parametrize("layout", Int4Layout)
@given(experts=SIZES, strips=SIZES, pairs=SIZES, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_restoring_undoes_arranging(
    layout: Int4Layout, experts: int, strips: int, pairs: int, seed: int
) -> None:
    """What is converted in one layout must be readable for a kernel that wants the other."""
    random = torch.Generator().manual_seed(seed)
    shape = (experts, STRIP_ROWS * strips, 2 * pairs)
    levels = torch.randint(0, 16, (*shape[:2], shape[2] * 32), dtype=torch.uint8, generator=random)
    scales = torch.randint(0, 2**15, shape, dtype=torch.int16, generator=random)
    assert torch.equal(restore_levels(arrange_levels(levels, layout), layout), levels)
    assert torch.equal(restore_scales(arrange_scales(scales, layout), layout), scales)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_arranged_values_are_aiters(name: str) -> None:
    """The order is defined as what AITER's shuffles and packing made of these levels and scales."""
    arrays = golden(name)
    levels = torch.from_numpy((arrays["int4_values"] & 0xF).astype(np.uint8))
    scales = torch.from_numpy(arrays["scale_bf16_bits_EGN"].transpose(0, 2, 1).copy())
    packed = torch.from_numpy(arrays["packed_shuffled"])
    assert torch.equal(pack_nibbles(arrange_levels(levels, AITER)), packed)
    assert torch.equal(restore_levels(unpack_nibbles(packed), AITER), levels)
    paired = arrange_scales(scales, AITER)
    assert paired.shape == (len(scales), scales.shape[2] // 2, scales.shape[1], 2)
    assert np.array_equal(paired.numpy().ravel(), arrays["scale_shuffled_bf16_bits"])
    assert torch.equal(restore_scales(paired, AITER), scales)


@given(experts=SIZES, strips=SIZES, pairs=SIZES, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_a_word_stays_a_word_of_its_strip(experts: int, strips: int, pairs: int, seed: int) -> None:
    """It is what a conversion in place rests on: a strip is overwritten by nothing but its own words."""
    groups = 2 * pairs
    random = np.random.default_rng(seed)
    plain = random.integers(0, 256, (experts, STRIP_ROWS * strips, groups * 16), dtype=np.uint8)
    wanted = np.empty(plain.size // 4, np.uint32)
    for number, word in enumerate(plain.reshape(-1).view(np.uint32).tolist()):
        row, place = divmod(number, groups * WORDS_PER_GROUP)
        strip, n = divmod(row, STRIP_ROWS)
        g, j = divmod(place, WORDS_PER_GROUP)
        nibbles = [word >> 4 * k & 0xF for k in NIBBLE_ORDER]
        target = strip * STRIP_ROWS * WORDS_PER_GROUP * groups + g * 64 + (j >> 1) * 32 + n * 2 + (j & 1)
        wanted[target] = sum(nibble << 4 * k for k, nibble in enumerate(nibbles))
    arranged = pack_nibbles(arrange_levels(unpack_nibbles(torch.from_numpy(plain)), AITER))
    assert np.array_equal(arranged.numpy().reshape(-1).view(np.uint32), wanted)


def test_plain_is_left_as_it_is() -> None:
    """The checkpoint's own order needs no copy, and there any shape is possible."""
    levels, scales = torch.zeros(1, 3, 96, dtype=torch.uint8), torch.zeros(1, 3, 3)
    assert arrange_levels(levels, PLAIN) is restore_levels(levels, PLAIN) is levels
    assert arrange_scales(scales, PLAIN) is restore_scales(scales, PLAIN) is scales
    check_shape(PLAIN, 3, 3)


@pytest.mark.parametrize(("rows", "groups"), [(24, 4), (16, 3), (1, 1)])
def test_shapes_that_a_layout_cannot_hold_are_refused(rows: int, groups: int) -> None:
    """Whoever splits a matrix over ranks learns which dimension was cut to what."""
    check_shape(AITER, 16, 2)
    with pytest.raises(ValueError, match="multiples of 16 and columns in multiples of 64") as refusal:
        check_shape(AITER, rows, groups)
    assert f"got {rows} rows and {32 * groups} columns" in str(refusal.value)


@given(st.binary(min_size=16, max_size=16))
def test_packing_is_the_inverse_of_unpacking(raw: bytes) -> None:
    """Nibble order is a convention shared with the checkpoint: low nibble = even column."""
    packed = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    nibbles = unpack_nibbles(packed)
    assert torch.equal(pack_nibbles(nibbles), packed)
    assert nibbles[:2].tolist() == [raw[0] & 0xF, raw[0] >> 4]


def test_values_of_mxfp4_are_exact_at_both_ends() -> None:
    """float32 holds them all, subnormal ones included, and a NaN exponent is not just a large one."""
    packed = torch.full((3, 16), 0xF1, dtype=torch.uint8)
    values = dequantize_mxfp4(packed, torch.tensor([[0], [252], [255]], dtype=torch.uint8))
    assert values[:2, :2].tolist() == [[2.0**-128, -6 * 2.0**-127], [2.0**124, -6 * 2.0**125]]
    assert values[2].isnan().all()


def test_values_of_int4_are_rounded_products() -> None:
    """The kernel multiplies in bf16: 7 * 0.98828125 has one bit more than that holds."""
    packed = torch.full((1, 16), 0x87, dtype=torch.uint8)
    values = dequantize_int4(packed, torch.tensor([[0.98828125]], dtype=torch.bfloat16))
    assert values[0, :2].tolist() == [6.90625, -7.90625]
    assert 7 * 0.98828125 == 6.91796875
