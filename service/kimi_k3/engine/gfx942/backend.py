# SPDX-License-Identifier: Apache-2.0
"""int4 experts through AITER's FlyDSL kernels."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
from vllm import envs
from vllm._aiter_ops import IS_AITER_FOUND, rocm_aiter_ops
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import (
    Mxfp4MoeBackend,
    backend_to_kernel_cls,
    make_mxfp4_moe_quant_config,
)
from vllm.model_executor.layers.quantization.mxfp4 import _use_k3_situ_int4_gfx942
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kInt4Static32, kMxfp4Static

from kimi_k3.engine.backend import Int4Backend
from kimi_k3.engine.request import INT4_FLAG
from kimi_k3.errors import OperatorError
from kimi_k3.words.backends import AITER_INT4
from kimi_k3.words.weights import Int4Layout


def aiter_backend(moe: FusedMoEConfig) -> Int4Backend:
    """AITER's int4 kernels, if vLLM's own gate for them is open.

    Raises:
        OperatorError: it is closed, and stock vLLM would ignore the request and emulate MXFP4 at a few tokens
            per second; or activations would not stay bf16. Names what is in the way.
    """
    found = lack(moe)
    if found is None and not _use_k3_situ_int4_gfx942(moe):
        found = Lack("vLLM's gate for it is closed", "report this with the log: nobody knows why")
    if found is not None:
        raise OperatorError(
            f"{INT4_FLAG}: {found.why}: vLLM would ignore the request and emulate MXFP4, or compute wrongly",
            remedy=found.remedy,
        )
    return Int4Backend(
        name=AITER_INT4,
        layout=Int4Layout.AITER,
        experts_class=experts_class(),
        scheme=_scheme,
        as_kernels_want=_as_kernels_want,
    )


class Lack(NamedTuple):
    """What is in the way, and what to do."""

    why: str
    remedy: str


def lack(moe: FusedMoEConfig) -> Lack | None:
    """Which condition of vLLM's ``_use_k3_situ_int4_gfx942`` does not hold, but for the request itself."""
    if not IS_AITER_FOUND:
        return Lack("AITER is not installed", "use the image, or install AITER 0.1.23 or later")
    if not envs.VLLM_ROCM_USE_AITER:
        return Lack("VLLM_ROCM_USE_AITER is not 1", "set VLLM_ROCM_USE_AITER=1, as the profiles do")
    if not envs.VLLM_ROCM_USE_AITER_MOE:
        return Lack("VLLM_ROCM_USE_AITER_MOE is 0", "leave VLLM_ROCM_USE_AITER_MOE out")
    if moe.activation_situ_linear_beta is None:
        return Lack("the checkpoint names no linear beta for SiTU", "serve a Kimi-K3 checkpoint")
    if rocm_aiter_ops.is_fused_moe_situv2_enabled():
        activation = rocm_aiter_ops.get_fused_moe_situv2_activation()
        return Lack(
            f"VLLM_ROCM_USE_AITER_MOE_SITUV2 is {activation}, for kernels that gfx942 does not have",
            "set VLLM_ROCM_USE_AITER_MOE_SITUV2=a16w4, as the profiles do",
        )
    return _activation_ignored()


def _activation_ignored() -> Lack | None:
    """AITER before ROCm/aiter#4646 takes no activation and computes SiLU; vLLM asks for it, too."""
    newer = "install AITER 0.1.23 or later, or use the image"
    try:
        from aiter.ops.flydsl.kernels.moe_2stage_a16wmix import flydsl_a16w4_gemm1
    except ImportError as error:
        return Lack(f"AITER's int4 kernels cannot be imported ({error})", newer)
    if "act" not in inspect.signature(flydsl_a16w4_gemm1).parameters:
        return Lack("this AITER's flydsl_a16w4_gemm1 takes no act and would compute SiLU", newer)
    return None


@cache
def experts_class() -> type[Any]:
    """vLLM's experts class for AITER, saying that it supports what it is used for.

    vLLM 0.32.0 converts and then asks the class only whether it supports MXFP4, which it denies outside
    gfx950: its own int4 path ends there. 0.33.0 asks for int4 as well.
    """
    (upstream,) = backend_to_kernel_cls(Mxfp4MoeBackend.AITER_MXFP4_BF16)

    class AiterInt4Experts(upstream):  # type: ignore[misc, valid-type]
        """``int4_per_group_32`` weights, bf16 activations."""

        @staticmethod
        def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
            return weight_key in (kInt4Static32, kMxfp4Static) and activation_key is None

    return AiterInt4Experts


def _scheme(w13_scales: torch.Tensor, w2_scales: torch.Tensor) -> FusedMoEQuantConfig:
    # As upstream: the kernels tell int4 from MXFP4 by the weights' dtype.
    config = make_mxfp4_moe_quant_config(
        mxfp4_backend=Mxfp4MoeBackend.AITER_MXFP4_BF16, w1_scale=w13_scales, w2_scale=w2_scales
    )
    assert config is not None
    return config


def _as_kernels_want(weights: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from aiter import dtypes

    as_int4: torch.Tensor = weights.view(dtypes.i4x2)
    as_int4.__dict__["is_shuffled"] = True  # AITER asks the tensor for it
    return as_int4, scales.reshape(-1)
