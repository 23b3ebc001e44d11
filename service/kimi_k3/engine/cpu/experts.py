# SPDX-License-Identifier: Apache-2.0
"""Routed experts on a CPU: dequantise the experts that a batch needs, multiply, weight and add.

The order of additions does not depend on the batch, so a request gets the same sums alone and among
others.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kMxfp4Static
from vllm.platforms import current_platform

from kimi_k3.conversion.mxfp4 import dequantize_int4, dequantize_mxfp4


class _CpuExperts(mk.FusedMoEExpertsModular):
    """What both weight formats share."""

    @staticmethod
    @abstractmethod
    def dequantize(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The float32 matrix ``[N, K]`` of packed weights ``[N, K / 2]`` and scales ``[N, K / 32]``."""

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        **_: Any,
    ) -> None:
        """Write the weighted sum of the local experts' outputs, ``[T, K]``, to ``output``.

        ``w1`` holds gate and up rows, ``[E, 2 * I, K / 2]``; ``w2`` is ``[E, K, I / 2]``; both packed.
        """
        if apply_router_weight_on_input:
            raise NotImplementedError("router weights on the input are not supported on a CPU")
        local_ids = topk_ids.long() if expert_map is None else expert_map.long()[topk_ids.long()]
        output.zero_()
        for expert in local_ids.unique().tolist():
            if expert < 0:  # another rank's
                continue
            tokens, slots = (local_ids == expert).nonzero(as_tuple=True)
            dtype = hidden_states.dtype
            w13 = self.dequantize(w1[expert], self.w1_scale[expert]).to(dtype)
            down = self.dequantize(w2[expert], self.w2_scale[expert]).to(dtype)
            out = self._situ(hidden_states[tokens] @ w13.T).to(dtype) @ down.T
            output.index_add_(0, tokens, (out * topk_weights[tokens, slots].unsqueeze(-1)).to(output.dtype))

    def _situ(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)``, float32."""
        beta = self.moe_config.activation_situ_beta
        linear_beta = self.moe_config.activation_situ_linear_beta
        gate, up = gate_up.float().chunk(2, dim=-1)
        if linear_beta is not None:
            up = linear_beta * torch.tanh(up / linear_beta)
        situ: torch.Tensor = torch.sigmoid(gate) * beta * torch.tanh(gate / beta) * up
        return situ

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Weighting and reduction are done in :meth:`apply`."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M: int, N: int, K: int, *_: Any, **__: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No shared work space; the output is ``[T, K]``."""
        return (0,), (0,), (M, K)

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Activations stay as they are."""
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """Tokens in one ``[T, K]`` matrix."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cpu())

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        # The key names the checkpoint's scheme, also where int4 is what will be served.
        return bool(weight_key == kMxfp4Static) and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return bool(activation == MoEActivation.SITU)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        # The communicator of CPUs gathers and scatters; the experts then see the tokens of all ranks.
        return not moe_parallel_config.use_all2all_kernels or moe_parallel_config.use_ag_rs_all2all_kernels


class Mxfp4CpuExperts(_CpuExperts):
    """The checkpoint's values, exactly."""

    @staticmethod
    def dequantize(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """MXFP4 codes and E8M0 scales."""
        return dequantize_mxfp4(packed, scale)


class Int4CpuExperts(_CpuExperts):
    """int4_per_group_32, with the bf16 rounding of ``q * scale`` that the GPU kernel has."""

    @staticmethod
    def dequantize(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """int4 nibbles and bf16 scales."""
        return dequantize_int4(packed, scale)
