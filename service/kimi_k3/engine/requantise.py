# SPDX-License-Identifier: Apache-2.0
"""Weight processing: a layer's projections become int4 in the memory that they have."""

from __future__ import annotations

from dataclasses import asdict

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.utils import replace_parameter

from kimi_k3.conversion.candidates import rule_of
from kimi_k3.conversion.experts import convert_experts_
from kimi_k3.conversion.loss import total, worst
from kimi_k3.conversion.nonfinite import NonFiniteGroupError
from kimi_k3.engine.backend import Int4Backend
from kimi_k3.engine.memory import read_memory
from kimi_k3.engine.reporter import rank_reporter
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.journal.models import ProjectionConversion
from kimi_k3.journal.writer import now
from kimi_k3.words.weights import Projection, Requantisation


def requantise_layer(layer: RoutedExperts, requantisation: Requantisation, backend: Int4Backend) -> None:
    """Convert both projections, one after the other, and report each.

    The weights take as many bytes as before and stay where they are; the E8M0 scales are freed when the bf16
    scales, twice as large, take their place.

    Raises:
        OperatorError: a group has NaN or infinite values, or the layer was converted before. The weights are
            then of no further use.
    """
    index = layer_number(layer.layer_name)
    if getattr(layer, _DONE, False):
        raise OperatorError(
            f"layer {index}: its experts are int4 already and cannot be converted again",
            remedy="start anew instead of reloading weights (reload_weights, update_weights, sleep level 2)",
        )
    setattr(layer, _DONE, True)
    for projection in Projection:
        _requantise(layer, index, projection, requantisation, backend)


_DONE = "kimi_k3_int4"


def _requantise(
    layer: RoutedExperts,
    index: int,
    projection: Projection,
    requantisation: Requantisation,
    backend: Int4Backend,
) -> None:
    weight = getattr(layer, f"{projection}_weight").data
    e8m0 = getattr(layer, f"{projection}_weight_scale").data
    bytes_read, experts = weight.nbytes + e8m0.nbytes, weight.shape[0]
    started_at, memory_before = now(), read_memory()
    try:
        scales, losses = convert_experts_(
            weight,
            e8m0,
            rule_of(requantisation),
            backend.layout,
            allow_nonfinite=requantisation.allow_nonfinite,
        )
    except NonFiniteGroupError as error:
        raise OperatorError(
            f"layer {index}, {projection}, rank {rank_reporter().record.rank}: {error}",
            remedy="compare the shards with their source; --weights mxfp4 serves them as they are, "
            "--allow-nonfinite serves such groups as they are, NaN or infinite",
            exit_code=ExitCode.BAD_CHECKPOINT,
        ) from None
    highest = worst(dict(enumerate(losses)))
    converted, scales = backend.as_kernels_want(weight, scales)
    if converted is not weight:  # else it stands where it is, and would be copied onto itself
        replace_parameter(layer, f"{projection}_weight", converted)
    replace_parameter(layer, f"{projection}_weight_scale", scales)
    del e8m0  # the last reference: what is read of the memory below is without them
    rank_reporter().converted(
        ProjectionConversion(
            layer=index,
            projection=projection,
            started_at=started_at,
            ended_at=now(),
            experts=experts,
            bytes_read=bytes_read,
            bytes_written=converted.nbytes + scales.nbytes,
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
