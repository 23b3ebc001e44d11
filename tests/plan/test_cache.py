# SPDX-License-Identifier: Apache-2.0
"""The cache's layout against what a public run printed, to the token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3.plan.cache import cache_layout
from kimi_k3.plan.sharding import Parallelism
from kimi_k3.words.gpus import GIB

from ..checkpoint.imitation import published_config

TEXT = published_config().text_config
TP8 = Parallelism(tensor=8)


def test_bytes_of_a_token_and_of_a_sequence() -> None:
    """24 MLA layers keep 576 bfloat16 numbers per token, whatever the ranks: 27 KiB."""
    layout = cache_layout(TEXT, TP8)
    assert layout.bytes_per_token == 27 * 1024
    assert layout.state_bytes == 69 * (3 * 3 * 1536 * 2 + 12 * 128 * 128 * 4)


def test_the_tokens_of_a_public_run() -> None:
    """8 x MI325X printed 948,305 tokens for sequences of 16,384 (vllm-project/vllm#51274).

    Of all numbers of blocks only 1,447 give that figure, so pages of 768 tokens, three blocks of states per
    sequence and the rounding are those of vLLM.
    """
    layout = cache_layout(TEXT, TP8)
    assert (layout.block_tokens, layout.state_blocks, layout.blocks(16384)) == (768, 3, 25)
    assert layout.capacity(1447 * layout.block_bytes, 16384) == 948_305
    assert 1447 * layout.block_bytes / GIB == pytest.approx(28.61, abs=0.01)


def test_prefix_caching_keeps_two_states() -> None:
    """With prefix caching a state is kept beside the one that is written."""
    assert cache_layout(TEXT, TP8, prefix_caching=True).state_blocks == 6


def test_decode_context_parallelism_shares_the_tokens() -> None:
    """Eight ranks that take turns hold eight times the tokens in the same bytes; states are not shared."""
    one = cache_layout(TEXT, TP8)
    eight = cache_layout(TEXT, Parallelism(tensor=8, decode_context=8))
    assert eight.bytes_per_token * 8 == one.bytes_per_token
    assert eight.block_tokens == 8 * one.block_tokens
    assert (eight.state_bytes, eight.block_bytes) == (one.state_bytes, one.block_bytes)


@given(memory=st.integers(0, 60 * GIB), length=st.integers(1, 2**20), caching=st.booleans())
@settings(max_examples=200, deadline=None)
def test_what_is_promised_fits(memory: int, length: int, caching: bool) -> None:
    """Sequences, the longest one and the capacity are three views of the same blocks."""
    layout = cache_layout(TEXT, TP8, prefix_caching=caching)
    fit = layout.sequences(memory, length)
    assert fit * layout.blocks(length) * layout.block_bytes <= memory
    assert (fit + 1) * layout.blocks(length) > layout.pool(memory)
    longest = layout.longest(memory)
    assert longest == 0 or layout.blocks(longest) <= layout.pool(memory) < layout.blocks(longest + 1)
    assert layout.capacity(memory, length) >= fit * length


@pytest.mark.parametrize(("asked", "tokens"), [(16, 768), (128, 768), (400, 800), (2048, 2048)])
def test_a_block_size_that_is_asked_for(asked: int, tokens: int) -> None:
    """vLLM rounds up what is asked for until a page holds a state (``_align_hybrid_block_size``)."""
    assert cache_layout(TEXT, TP8, block_tokens=asked).block_tokens == tokens
