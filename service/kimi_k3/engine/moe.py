# SPDX-License-Identifier: Apache-2.0
"""The quantisation method of Kimi-K3's routed experts.

:class:`KimiK3Mxfp4Config` takes the place of vLLM's ``mxfp4`` configuration through vLLM's official
hook ``register_quantization_config``; for layers that are not Kimi-K3's it is vLLM's own.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEMethodBase,
    FusedMoEQuantConfig,
    RoutedExperts,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import int4_w4a16_moe_quant_config
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config, Mxfp4MoEMethod
from vllm.model_executor.utils import replace_parameter

from kimi_k3.conversion.candidates import GROUP_SIZE, rule_of
from kimi_k3.conversion.experts import convert_experts_
from kimi_k3.conversion.loss import total, worst
from kimi_k3.conversion.nonfinite import NonFiniteGroupError
from kimi_k3.engine.memory import read_memory
from kimi_k3.engine.reporter import rank_reporter
from kimi_k3.engine.request import INT4_FLAG, requested_weights
from kimi_k3.engine.voice import reported
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.journal.models import ProjectionConversion
from kimi_k3.journal.writer import now
from kimi_k3.words.environment import EngineEnvironment
from kimi_k3.words.weights import Int4Layout, Projection


class KimiK3Mxfp4Config(Mxfp4Config):
    """vLLM's ``mxfp4`` configuration with a MoE method of ours, in float32 too."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """bf16 as on the GPU, and float32, in which a CPU run is reproducible."""
        return [torch.bfloat16, torch.float32]

    def _make_moe_method(self, moe: FusedMoEConfig) -> FusedMoEMethodBase:
        with reported():
            weights = requested_weights()
            if moe.activation == MoEActivation.SITU:
                return KimiK3MoEMethod(moe)
            if weights.lossy:
                raise OperatorError(
                    f"{INT4_FLAG}: int4 kernels have only situ, these experts use {moe.activation.value}",
                    remedy="serve a Kimi-K3 checkpoint, or leave the flag out",
                    exit_code=ExitCode.BAD_CHECKPOINT,
                )
        return super()._make_moe_method(moe)


class KimiK3MoEMethod(Mxfp4MoEMethod):
    """Serves the experts as MXFP4, exactly, or converts them to int4 after loading."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        self.weights = requested_weights()
        self.requantisation = EngineEnvironment.read().requantisation
        self.rule = rule_of(self.requantisation)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Convert the layer's projections in place if int4 is asked for, then build its kernel."""
        if not self.weights.lossy:
            super().process_weights_after_loading(layer)
            return
        with reported():
            for projection in Projection:
                self._convert(layer, projection)
        self._build_moe_kernel(layer)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig | None:
        """The scheme that the experts class reads its scales from."""
        if not self.weights.lossy:
            return super().get_fused_moe_quant_config(layer)
        return int4_w4a16_moe_quant_config(
            w1_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale, block_shape=[0, GROUP_SIZE]
        )

    def _convert(self, layer: RoutedExperts, projection: Projection) -> None:
        weight = getattr(layer, f"{projection}_weight").data
        e8m0 = getattr(layer, f"{projection}_weight_scale").data
        layer_index = layer_number(layer.layer_name)
        started_at, memory_before = now(), read_memory()
        try:
            scales, losses = convert_experts_(
                weight, e8m0, self.rule, Int4Layout.PLAIN, allow_nonfinite=self.requantisation.allow_nonfinite
            )
        except NonFiniteGroupError as error:
            raise OperatorError(
                f"layer {layer_index}, {projection}, rank {rank_reporter().record.rank}: {error}",
                remedy="compare the shards with their source; --weights mxfp4 serves them as they are, "
                "--allow-nonfinite serves such groups as they are, NaN or infinite",
                exit_code=ExitCode.BAD_CHECKPOINT,
            ) from None
        highest = worst(dict(enumerate(losses)))
        replace_parameter(layer, f"{projection}_weight_scale", scales)
        rank_reporter().converted(
            ProjectionConversion(
                layer=layer_index,
                projection=projection,
                started_at=started_at,
                ended_at=now(),
                experts=weight.shape[0],
                bytes_read=weight.nbytes + e8m0.nbytes,
                bytes_written=weight.nbytes + scales.nbytes,
                memory_before=memory_before,
                memory_after=read_memory(),
                **asdict(total(losses)),
                worst_expert=highest[0] if highest else None,
                worst_expert_relative_mse=highest[1] if highest else None,
            )
        )


def layer_number(layer_name: str) -> int:
    """The decoder layer, from 0, in a name such as ``model.layers.3.block_sparse_moe.experts``."""
    _, _, rest = layer_name.partition(".layers.")
    return int(rest.split(".", 1)[0])
