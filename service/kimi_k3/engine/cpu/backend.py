# SPDX-License-Identifier: Apache-2.0
"""int4 experts on a CPU."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.config import int4_w4a16_moe_quant_config

from kimi_k3.conversion.candidates import GROUP_SIZE
from kimi_k3.engine.backend import Int4Backend
from kimi_k3.engine.cpu.experts import Int4CpuExperts
from kimi_k3.words import backends as names
from kimi_k3.words.weights import Int4Layout


def _scheme(w13_scales: torch.Tensor, w2_scales: torch.Tensor) -> FusedMoEQuantConfig:
    return int4_w4a16_moe_quant_config(w1_scale=w13_scales, w2_scale=w2_scales, block_shape=[0, GROUP_SIZE])


CPU_INT4 = Int4Backend(
    name=names.CPU_INT4,
    layout=Int4Layout.PLAIN,
    experts_class=Int4CpuExperts,
    scheme=_scheme,
    as_kernels_want=lambda weights, scales: (weights, scales),
)
