# SPDX-License-Identifier: Apache-2.0
"""How converted experts are computed on one kind of device.

Three things that upstream does in one function are apart here, as its own design of MoE back ends asks:
choosing a back end (:mod:`kimi_k3.engine.choice`), processing weights for it
(:mod:`kimi_k3.engine.requantise`), and building its kernel (vLLM's ``_build_moe_kernel``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kimi_k3.engine.proof import Kernel, Problem
from kimi_k3.words.weights import Int4Layout

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEQuantConfig


@dataclass(frozen=True)
class Int4Backend:
    """One back end for int4 experts.

    Attributes:
        name: as in logs, journal and metrics; beside vLLM's own names of back ends.
        layout: of the weights and scales that its kernels read.
        experts_class: vLLM's ``FusedMoEExperts`` that calls them.
        scheme: how its kernels learn of the scales of ``w13`` and ``w2``.
        as_kernels_want: the converted ``[E, N, K / 2]`` uint8 weights and the layout's scales as the kernels
            take them, over the same memory.
    """

    name: str
    layout: Int4Layout
    experts_class: type[Any]
    scheme: Callable[[torch.Tensor, torch.Tensor], FusedMoEQuantConfig]
    as_kernels_want: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def kernel(backend: Int4Backend, moe: FusedMoEConfig) -> Kernel:
    """What serving calls, for :func:`kimi_k3.engine.proof.prove`: the experts' class of vLLM and all below.

    Args:
        moe: of a layer.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    def all_experts(used: torch.Tensor) -> torch.Tensor:
        """With the rank's other experts, which are zero and get no token."""
        every = torch.zeros((moe.num_local_experts, *used.shape[1:]), dtype=used.dtype, device=used.device)
        every[: len(used)] = used
        return every

    def compute(problem: Problem) -> torch.Tensor:
        (w13, w13_scales), (w2, w2_scales) = (
            backend.as_kernels_want(
                all_experts(matrix.packed(backend.layout)),
                all_experts(matrix.arranged_scales(backend.layout)),
            )
            for matrix in (problem.w13, problem.w2)
        )
        experts = backend.experts_class(moe_config=moe, quant_config=backend.scheme(w13_scales, w2_scales))
        output = torch.zeros_like(problem.hidden)
        unused = torch.empty(0, dtype=problem.hidden.dtype, device=problem.hidden.device)
        experts.apply(
            output=output,
            hidden_states=problem.hidden,
            w1=w13,
            w2=w2,
            topk_weights=problem.expert_weights,
            topk_ids=problem.expert_ids,
            activation=MoEActivation.SITU,
            global_num_experts=moe.num_experts,
            expert_map=_expert_map(moe, consumes_mask=experts.consumes_expert_mask, device=output.device),
            a1q_scale=None,
            a2_scale=None,
            workspace13=unused,
            workspace2=unused,
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        return output

    return compute


def _expert_map(moe: FusedMoEConfig, *, consumes_mask: bool, device: torch.device) -> torch.Tensor | None:
    """As of the first rank of expert parallelism, whose experts are the first; ``None`` without it.

    AITER takes a mask with one more place than there are experts, other classes the local numbers (vLLM's
    ``ExpertMapManager``).
    """
    import torch

    if moe.num_local_experts == moe.num_experts:
        return None
    if consumes_mask:
        mask = torch.zeros(moe.num_experts + 1, dtype=torch.int32, device=device)
        mask[: moe.num_local_experts] = 1
        return mask
    numbers = torch.full((moe.num_experts,), -1, dtype=torch.int32, device=device)
    numbers[: moe.num_local_experts] = torch.arange(moe.num_local_experts, dtype=torch.int32, device=device)
    return numbers
