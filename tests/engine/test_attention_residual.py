# SPDX-License-Identifier: Apache-2.0
"""The CPU stand-in for the attention residual against the definition in the reference."""

from __future__ import annotations

import torch

from kimi_k3.engine.cpu.attention_residual import attn_res
from tests.reference.forward import residual_mix, rms_norm

TOKENS, HIDDEN, EPS = 4, 8, 1e-5
NORM, QK, OUTPUT_NORM = (torch.linspace(0.5, 1.5, HIDDEN) * factor for factor in (1.0, -0.7, 1.2))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_mixture_equals_the_definition() -> None:
    """Sources are the valid blocks and the updated prefix; blocks beyond the valid ones are garbage."""
    prefix, delta, blocks = _random(TOKENS, HIDDEN), _random(TOKENS, HIDDEN) + 1, _random(TOKENS, 3, HIDDEN)
    blocks[:, 2] = torch.nan
    running = prefix + delta
    out = attn_res(prefix.clone(), delta, blocks, NORM, QK, OUTPUT_NORM, 2, -1, EPS, EPS)
    expected = rms_norm(residual_mix([blocks[:, 0], blocks[:, 1], running], NORM, QK, EPS), OUTPUT_NORM, EPS)
    torch.testing.assert_close(out, expected)


def test_prefix_and_block_are_written_in_place() -> None:
    """The model goes on with the tensors that it passed in, as after the GPU kernel."""
    prefix, delta, blocks = (
        _random(TOKENS, HIDDEN),
        _random(TOKENS, HIDDEN) + 1,
        torch.zeros(TOKENS, 2, HIDDEN),
    )
    running = prefix + delta
    attn_res(prefix, delta, blocks, NORM, QK, None, 1, 1, EPS, EPS)
    assert torch.equal(prefix, running)
    assert torch.equal(blocks[:, 1], running)


def test_without_blocks_the_prefix_passes_through() -> None:
    """In the first layer there is one source, and a softmax over one is 1."""
    prefix = _random(TOKENS, HIDDEN)
    assert torch.equal(
        attn_res(prefix, None, torch.zeros(TOKENS, 1, HIDDEN), NORM, QK, None, 0, 0, EPS, EPS), prefix
    )
