# SPDX-License-Identifier: Apache-2.0
"""How vLLM cuts the memory it has left into a cache, and how many tokens that is. Pure.

Kimi-K3 has two kinds of attention. A layer with MLA keeps a few bytes for every token; one with KDA keeps a
state for every sequence, however long it is. vLLM 0.32 serves both from one pool of blocks: a block is a page
of each of 24 layers, and a page is as large as a KDA state, so it holds 768 tokens of MLA. A sequence takes
one block for every 768 tokens and one for every 24 KDA layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kimi_k3.checkpoint import TextConfig
from kimi_k3.plan.sharding import Parallelism, stages

MLA_BLOCK_MULTIPLE = 128
"""Tokens to which the pages of a model with MLA are rounded (``_align_hybrid_block_size``,
vllm/platforms/interface.py)."""

KDA_STATE_BYTES_PER_ELEMENT = 4
"""The recurrent state is float32 (``kda_state_dtype``, vllm/model_executor/layers/mamba/mamba_utils.py)."""

BLOCKS_OF_A_STATE = {False: 1, True: 2}
"""Blocks per sequence and group of KDA layers, by whether prefixes are cached (``MambaSpec``,
vllm/v1/kv_cache_interface.py)."""

MERGE_BELOW = 1.5
"""If the layers of one kind are fewer than so many times those of the other, a group takes all of them
(``_get_kv_cache_groups_uniform_page_size``, vllm/v1/core/kv_cache_utils.py)."""


@dataclass(frozen=True)
class CacheLayout:
    """How a rank's cache is laid out.

    Attributes:
        bytes_per_token: of all MLA layers, if every byte of a page were used.
        state_bytes: of a sequence's KDA states, in all layers.
        block_tokens: tokens of one block.
        block_bytes: of one block, in all layers of a group.
        state_blocks: blocks that a sequence takes for its states.
    """

    bytes_per_token: int
    state_bytes: int
    block_tokens: int
    block_bytes: int
    state_blocks: int

    def blocks(self, tokens: int) -> int:
        """Blocks of a sequence of so many tokens."""
        return math.ceil(tokens / self.block_tokens) + self.state_blocks

    def capacity(self, memory: int, max_model_len: int) -> int:
        """Tokens in so many bytes if every sequence has ``max_model_len``, as vLLM logs them."""
        return int(self.pool(memory) / self.blocks(max_model_len) * max_model_len)

    def sequences(self, memory: int, max_model_len: int) -> int:
        """Sequences of ``max_model_len`` tokens that fit whole."""
        return self.pool(memory) // self.blocks(max_model_len)

    def longest(self, memory: int) -> int:
        """Tokens of the longest sequence that fits alone; 0 if none does."""
        return max(0, self.pool(memory) - self.state_blocks) * self.block_tokens

    def pool(self, memory: int) -> int:
        """Blocks in so many bytes."""
        return max(0, memory) // self.block_bytes


def cache_layout(
    text: TextConfig,
    cut: Parallelism,
    *,
    element_bytes: int = 2,
    prefix_caching: bool = False,
    block_tokens: int = 0,
) -> CacheLayout:
    """The layout on the rank with the most layers.

    Args:
        text: the decoder's config.
        cut: how it is cut into ranks.
        element_bytes: of the MLA cache and of the convolution's state, 2 for bfloat16.
        prefix_caching: whether prefixes are cached.
        block_tokens: ``--block-size``, which vLLM rounds up to hold a state; 0 without it.
    """
    stage = max(stages(text.num_hidden_layers, cut.pipeline), key=len)
    kda = sum(layer in set(text.kda_layers) for layer in stage)
    mla = len(stage) - kda
    per_layer = (text.kv_lora_rank + text.qk_rope_head_dim) * element_bytes
    state = _state_bytes(text, cut.tensor, element_bytes)
    multiple = max(MLA_BLOCK_MULTIPLE, block_tokens)
    block_tokens = multiple * math.ceil(state / (multiple * per_layer))
    few, many = sorted((kda, mla))
    group = many if many < MERGE_BELOW * few or not few else few
    return CacheLayout(
        bytes_per_token=mla * per_layer // cut.decode_context,
        state_bytes=kda * state,
        # With decode context parallelism the ranks take turns, so a block is worth more tokens.
        block_tokens=block_tokens * cut.decode_context,
        block_bytes=group * block_tokens * per_layer,
        state_blocks=math.ceil(kda / group) * BLOCKS_OF_A_STATE[prefix_caching],
    )


def _state_bytes(text: TextConfig, tensor: int, element_bytes: int) -> int:
    """Of one KDA layer and sequence on a rank: three convolutions' last inputs, and a matrix per head."""
    linear = text.linear_attn_config
    heads = linear.num_heads // tensor
    convolution = 3 * heads * linear.head_dim * (linear.short_conv_kernel_size - 1)
    recurrent = heads * linear.head_dim * linear.head_dim
    return convolution * element_bytes + recurrent * KDA_STATE_BYTES_PER_ELEMENT
