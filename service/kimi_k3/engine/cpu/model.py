# SPDX-License-Identifier: Apache-2.0
"""vLLM's ROCm Kimi-K3 classes, with stand-ins where they call GPU kernels.

vLLM's registry imports this module in the place of ``vllm.models.kimi_k3``, whose own choice for a
platform that is not ROCm are the NVIDIA classes.
"""

from __future__ import annotations

import vllm.models.kimi_k3.amd.kda as upstream_kda
import vllm.models.kimi_k3.amd.linear as upstream_linear
from vllm.config import VllmConfig
from vllm.models.kimi_k3.amd.kda_metadata import KimiK3ROCmKDAMetadataBuilder
from vllm.models.kimi_k3.amd.model import KimiK3ForConditionalGeneration

from kimi_k3.engine.cpu import attention_residual, kda

__all__ = ["KimiK3ForConditionalGeneration", "KimiLinearForCausalLM"]


def _install_stand_ins() -> None:
    """Replace the kernels' names where the model modules look them up: vLLM has no hook for these."""
    upstream_linear.attn_res = attention_residual.attn_res
    upstream_kda.chunk_kda_prefill = kda.chunk_kda_prefill
    upstream_kda.fused_recurrent_kda = kda.fused_recurrent_kda
    upstream_kda.fused_recurrent_kda_packed_decode = kda.fused_recurrent_kda_packed_decode
    # Both ask the ROCm platform module, which does not import here.
    upstream_kda.is_fused_kda_decode_supported = lambda *_: False
    upstream_kda.is_fused_kda_chunk_supported = lambda: False
    # Chunk metadata is made by a GPU kernel, for the chunked kernels only.
    KimiK3ROCmKDAMetadataBuilder._build_chunk_metadata = lambda *_: (None, None)


_install_stand_ins()


class KimiLinearForCausalLM(upstream_linear.KimiLinearForCausalLM):
    """The text model; keeps plain the weights that the model reads as tensors.

    vLLM packs linear weights for its CPU kernels and empties ``.weight``, but the attention residual
    reads ``*_res_proj.weight`` and the latent MoE's tail ``routed_expert_up_proj.weight``.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for name, module in self.named_modules():
            if name.endswith(("res_proj", "routed_expert_up_proj")):
                module._cpu_skip_gemm_dispatch = True
