# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3's attention residual in PyTorch.

Each sublayer reads a softmax mixture of earlier block states and the running prefix sum. The scores
are ``rms_norm(source, weight) . qk_weight``; the mixture may be normalised for the sublayer that
reads it. Computed in float32, as in vLLM's kernel.
"""

from __future__ import annotations

import torch


def attn_res(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
    *,
    quant_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Mix ``blocks[:, :num_blocks]`` and the prefix.

    Args:
        prefix: ``[T, D]``; ``delta`` (same shape) is added to it in place.
        blocks: ``[T, blocks, D]``; the new prefix is written to ``blocks[:, block_write_idx]`` if >= 0.
        norm_weight, qk_weight, output_norm_weight: ``[D]``.

    Returns:
        ``[T, D]`` in the dtype of ``prefix``.
    """
    if quant_dtype is not None:
        raise NotImplementedError("fp8 activations are not supported on a CPU")
    if delta is not None:
        prefix += delta
    if block_write_idx >= 0:
        blocks[:, block_write_idx] = prefix
    mixed = prefix.float()
    if num_blocks > 0:
        sources = torch.cat((blocks[:, :num_blocks].float(), mixed.unsqueeze(1)), dim=1)
        weights = norm_weight.float() * qk_weight.float()
        scores = (sources * weights).sum(-1) * torch.rsqrt(sources.square().mean(-1) + eps)
        mixed = (scores.softmax(-1).unsqueeze(-1) * sources).sum(1)
    if output_norm_weight is not None:
        mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + output_norm_eps)
        mixed = mixed * output_norm_weight.float()
    return mixed.to(prefix.dtype)
