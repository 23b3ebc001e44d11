# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM's way from MXFP4 to int4: the same sequence of torch operations, pass by pass, written anew.

Eight experts at a time (vLLM 0.32.0, ``Mxfp4MoEMethod``), through AITER's ``mxfp4_to_f32``, ``e8m0_to_f32``,
``per_1x32_i4_quant``, ``shuffle_weight((16, 16))``, ``pack_int8_to_packed_int4`` and
``shuffle_scale_for_int4``; the result is copied into its place and the allocator's cache emptied after every
chunk, and once more when the source is dropped. No pass is merged with another, since what is measured is
what these passes cost. The tests hold it to AITER's own output.
"""

from __future__ import annotations

import torch

from kimi_k3.conversion.candidates import MAGNITUDES

CHUNK_EXPERTS = 8
GROUP = 32


def values_of(packed: torch.Tensor) -> torch.Tensor:
    """``[E, N, K / 2]`` nibbles as float32 ``[E, N, K]``, by way of a table."""
    codes = packed.repeat_interleave(2, dim=-1)
    even, odd = codes[..., ::2], codes[..., 1::2]
    even.copy_(even & 0xF)
    odd.copy_(odd >> 4)
    table = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=packed.device)
    return table[codes.long()]


def scales_of(e8m0: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes as float32, by way of its bits."""
    bits = e8m0.to(torch.int32) << 23
    bits[e8m0 == 0] = 0x00400000
    bits[e8m0 == 0xFF] = 0x7F800001
    return bits.view(torch.float32)


def quantise(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 ``[E, N, K]`` as int8 levels and bfloat16 scales ``[E, K / 32, N]``, the largest to 7."""
    grouped = weights.view(*weights.shape[:-1], -1, GROUP)
    largest = grouped.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6)
    scales = (largest / 7.0).squeeze(-1)
    levels = (grouped / scales.unsqueeze(-1)).round().clamp(-7, 7).to(torch.int8).view(weights.shape)
    return levels, scales.transpose(-1, -2).contiguous().to(torch.bfloat16)


def shuffle(levels: torch.Tensor) -> torch.Tensor:
    """Tiles of 16 rows by 16 levels, two tiles of a group side by side."""
    experts, rows, columns = levels.shape
    tiles = levels.view(experts, rows // 16, 16, columns // 32, 2, 16)
    return tiles.permute(0, 1, 3, 4, 2, 5).contiguous().view(levels.shape)


def pack(levels: torch.Tensor) -> torch.Tensor:
    """Runs of eight levels as four bytes, the first four in the low nibbles."""
    nibbles = (levels.contiguous().view(-1).to(torch.int16) & 0xF).to(torch.uint8).view(-1, 8)
    packed = torch.empty((len(nibbles), 4), dtype=torch.uint8, device=levels.device)
    for byte in range(4):
        packed[:, byte] = nibbles[:, byte] | (nibbles[:, byte + 4] << 4)
    return packed.view(-1).to(torch.int8)


def pair_scales(scales: torch.Tensor) -> torch.Tensor:
    """``[E, G, N]`` as ``[E, G / 2, N, 2]``."""
    experts, groups, rows = scales.shape
    return scales.view(experts, groups // 2, 2, rows).permute(0, 1, 3, 2).contiguous()


def convert(source: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """All experts: nibbles ``[E, N, K / 2]`` uint8 and flat bfloat16 scales, in AITER's layout.

    Args:
        source: MXFP4 nibbles ``[E, N, K / 2]`` and E8M0 bytes ``[E, N, K / 32]``; emptied.
    """
    packed, e8m0 = source
    out = out_scales = None
    for first in range(0, len(packed), CHUNK_EXPERTS):
        chunk = slice(first, first + CHUNK_EXPERTS)
        values, units = values_of(packed[chunk]), scales_of(e8m0[chunk])
        weights = (
            (values.view(*units.shape, GROUP) * units.unsqueeze(-1)).view(values.shape).to(torch.bfloat16)
        )
        del values, units
        levels, scales = quantise(weights)
        del weights
        nibbles = pack(shuffle(levels))
        del levels
        paired = pair_scales(scales).view(-1).contiguous()
        if out is None or out_scales is None:
            out = torch.empty_like(packed)
            out_scales = torch.empty(e8m0.numel(), dtype=torch.bfloat16, device=packed.device)
        out[chunk].copy_(nibbles.view(torch.uint8).view(out[chunk].shape))
        out_scales[first * e8m0[0].numel() :][: len(paired)].copy_(paired)
        del nibbles, scales, paired
        _empty_cache(packed.device)
    assert out is not None
    assert out_scales is not None
    source.clear()
    del packed, e8m0
    _empty_cache(out.device)
    return out, out_scales


def _empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
