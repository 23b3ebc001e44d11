# SPDX-License-Identifier: Apache-2.0
"""The quantisation method of Kimi-K3's routed experts.

:class:`KimiK3Mxfp4Config` takes the place of vLLM's ``mxfp4`` configuration through vLLM's official
hook ``register_quantization_config``; for layers that are not Kimi-K3's it is vLLM's own.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEMethodBase,
    FusedMoEQuantConfig,
    RoutedExperts,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config, Mxfp4MoEMethod
from vllm.model_executor.utils import is_weights_pre_processed
from vllm.platforms import current_platform

from kimi_k3.contract.facts import Use
from kimi_k3.engine.choice import UNSUPPORTED, choose_backend, prove_backend, require_support
from kimi_k3.engine.contract import check_contract
from kimi_k3.engine.guards import announced, check_gfx942, check_int4, refuse_reloading
from kimi_k3.engine.reporter import rank_reporter
from kimi_k3.engine.requantise import requantise_layer
from kimi_k3.engine.request import INT4_FLAG, requested_weights
from kimi_k3.engine.voice import reported
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.backends import CPU_MXFP4
from kimi_k3.words.environment import EngineEnvironment
from kimi_k3.words.weights import Weights


class KimiK3Mxfp4Config(Mxfp4Config):
    """vLLM's ``mxfp4`` configuration with MoE methods of ours, on a CPU in float32 too."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """bf16 as upstream, and on a CPU float32, in which a run is reproducible."""
        more = [torch.float32] if current_platform.is_cpu() else []
        return [*super().get_supported_act_dtypes(), *more]

    def _make_moe_method(self, moe: FusedMoEConfig) -> FusedMoEMethodBase:
        with reported():
            weights = requested_weights()
            if moe.activation == MoEActivation.SITU:
                _check(weights)
                return KimiK3Int4Method(moe) if weights.lossy else KimiK3Mxfp4Method(moe)
            if weights.lossy:
                raise OperatorError(
                    f"{INT4_FLAG}: int4 kernels have only situ, these experts use {moe.activation.value}",
                    remedy="serve a Kimi-K3 checkpoint, or leave the flag out",
                    exit_code=ExitCode.BAD_CHECKPOINT,
                )
        return super()._make_moe_method(moe)


def _check(weights: Weights) -> None:
    """What this start asks vLLM for can be served, and by a vLLM that is known.

    Raises:
        OperatorError: it cannot.
    """
    config = get_current_vllm_config()
    device = Use.CPU if current_platform.is_cpu() else Use.GFX942
    check_contract(device, *((Use.INT4,) if weights.lossy else ()))
    if weights.lossy:
        check_int4(config)
    if device is Use.GFX942:
        check_gfx942(config, weights)


class KimiK3Mxfp4Method(Mxfp4MoEMethod):
    """Serves the experts as MXFP4, exactly, in whichever way vLLM chooses."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        rank_reporter().serves_through(CPU_MXFP4 if current_platform.is_cpu() else self.mxfp4_backend.value)


class KimiK3Int4Method(Mxfp4MoEMethod):
    """Converts the experts to int4 after loading, for kernels that were proved right before it."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        backend = choose_backend(moe)
        with nullcontext() if current_platform.is_cpu() else announced():
            super().__init__(moe)
        refuse_reloading()
        self.backend = backend
        self.experts_cls = self.backend.experts_class
        require_support(self.experts_cls, moe, self.mxfp4_backend)
        self._require_no_round_up(moe)
        found = prove_backend(self.backend, moe, EngineEnvironment.read().requantisation)
        self.requantisation = found.requantisation
        rank_reporter().serves_through(self.backend.name, found)

    @property
    def supports_eplb(self) -> bool:
        """No: AITER's scales are one run of numbers, which cannot be moved expert by expert."""
        return False

    def _require_no_round_up(self, moe: FusedMoEConfig) -> None:
        """384 to 512 would cost 56 GiB of each GPU.

        Raises:
            OperatorError: vLLM would round a size up.
        """
        wanted = moe.hidden_dim, moe.intermediate_size_per_partition
        found = self.maybe_roundup_sizes(*wanted, moe.in_dtype, moe.moe_parallel_config)
        if found != wanted:
            raise OperatorError(
                f"{self.backend.name}: vLLM rounds the experts' hidden and intermediate sizes up from "
                f"{wanted} to {found}, which nobody tried",
                remedy="use a tensor-parallel size that leaves multiples of 128, or expert parallelism",
            )

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Convert the layer's projections in place, then build its kernel."""
        with reported():
            if is_weights_pre_processed():
                raise OperatorError(
                    f"{INT4_FLAG}: weights from a cache of processed weights would be converted again",
                    remedy="start without --load-format ipc_cache",
                )
            requantise_layer(layer, self.requantisation, self.backend)
            try:
                self._build_moe_kernel(layer)
            except ValueError as error:
                raise OperatorError(f"{self.backend.name}: {error}", remedy=UNSUPPORTED) from error

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        """The scheme that the experts' class reads its scales from."""
        return self.backend.scheme(layer.w13_weight_scale, layer.w2_weight_scale)
