# SPDX-License-Identifier: Apache-2.0
"""What the conversion did to the experts (``/conversion``): merged over ranks, and rank by rank."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from kimi_k3.journal.models import ProjectionConversion, RankRecord, SupervisorRecord, relative_mse
from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.arithmetic import finite, ratio, seconds_between
from kimi_k3.sidecar.view import View
from kimi_k3.words.weights import Projection, Requantisation, Weights

LOSSLESS_NOTE = (
    "The experts are served exactly as they stand in the checkpoint (MXFP4); nothing is converted."
)
LOSSY_NOTE = (
    "The experts are served as int4 in groups of 32, which differs from the checkpoint's values by the "
    "errors below."
)
UNKNOWN_NOTE = "No supervisor has reported what the experts are served as."

Key = tuple[int, Projection]


class Loss(View):
    """Sums over converted weights; null when nothing has been converted."""

    groups: int | None = Field(description="Groups of 32 weights.")
    lossless_groups: int | None = Field(description="Groups whose every value survived exactly.")
    zero_groups: int | None = Field(description="Groups of zeros only; they are lossless too.")
    nonfinite_groups: int | None = Field(
        description="Groups with NaN or infinite values, which are served so; in no other figure."
    )
    clamped_groups: int | None = Field(description="Groups too small for a scale of their own.")
    lossless_ratio: float | None = Field(description="lossless_groups / groups, 0 to 1.")
    relative_mse: float | None = Field(
        description="Sum of squared errors / sum of squared weights; null when all weights are zero."
    )
    max_error: float | None = Field(description="Largest |w - w'| of any weight, in the weights' unit.")
    bytes_read: int | None = Field(description="Bytes of checkpoint weights read.")
    bytes_written: int | None = Field(description="Bytes of int4 weights and scales written.")
    started_at: datetime | None = Field(description="When the first of them began.")
    ended_at: datetime | None = Field(description="When the last of them ended.")
    seconds: float | None = Field(description="From the first's begin to the last's end.")


class RankLoss(Loss):
    """One projection of one layer on one rank."""

    rank: int
    experts: int = Field(description="Experts that the rank converted.")
    worst_expert: int | None = Field(description="Which of them, from 0, lost most in proportion.")
    worst_expert_relative_mse: float | None = Field(
        description="That expert's relative mean squared error; null when all weights are zero."
    )


class LayerLoss(Loss):
    """One projection of one layer, over all ranks that have converted it."""

    layer: int
    projection: Projection
    missing_ranks: list[int] = Field(description="Ranks that have not converted it yet.")
    ranks: list[RankLoss]


class MissingConversion(View):
    """An expected conversion that some ranks have not reported."""

    layer: int
    projection: Projection
    ranks: list[int]


class ConversionProgress(View):
    """How many layer projections have been converted, over all ranks."""

    done: int
    expected: int
    fraction: float | None = Field(description="done / expected, 0 to 1.")


class Conversion(View):
    """What the conversion did to the experts."""

    weights: Weights | None = Field(description="What the experts are served as.")
    lossless: bool | None = Field(description="Whether they are the checkpoint's values, bit for bit.")
    note: str = Field(description="The same in a sentence.")
    requantisation: Requantisation | None = Field(description="How MXFP4 became int4. Null when it did not.")
    progress: ConversionProgress | None = Field(description="Null when nothing is to be converted.")
    total: Loss | None = Field(description="Over all layers and ranks.")
    layers: list[LayerLoss] = Field(description="Per layer and projection, in the model's order.")
    missing: list[MissingConversion] = Field(description="Expected conversions not reported yet.")


def served_lossy(journal: Journal) -> bool | None:
    """Whether any rank serves converted weights, or is to; ``None`` when nobody has said."""
    if journal.supervisor is None:
        return None
    return journal.supervisor.weights.lossy or any(record.weights.lossy for record in journal.ranks)


def conversion_view(journal: Journal) -> Conversion:
    """What ``/conversion`` answers."""
    supervisor = journal.supervisor
    lossy = served_lossy(journal)
    if supervisor is None or not lossy:
        return Conversion(
            weights=supervisor.weights if supervisor else None,
            lossless=None if lossy is None else True,
            note=UNKNOWN_NOTE if lossy is None else LOSSLESS_NOTE,
            requantisation=None,
            progress=None,
            total=None,
            layers=[],
            missing=[],
        )
    converted = conversions_by_key(journal.ranks)
    missing = missing_conversions(journal)
    expected = supervisor.all_expected_conversions()
    done = expected - sum(len(entry.ranks) for entry in missing)
    return Conversion(
        weights=supervisor.weights,
        lossless=False,
        note=LOSSY_NOTE,
        requantisation=_requantisation(journal, supervisor),
        progress=ConversionProgress(done=done, expected=expected, fraction=ratio(done, expected)),
        total=merged_loss([one for by_rank in converted.values() for one in by_rank.values()]),
        layers=[_layer(key, by_rank, supervisor) for key, by_rank in sorted(converted.items())],
        missing=missing,
    )


def conversions_by_key(ranks: tuple[RankRecord, ...]) -> dict[Key, dict[int, ProjectionConversion]]:
    """Conversions by layer and projection, then by rank; of a repeated one the last counts."""
    found: dict[Key, dict[int, ProjectionConversion]] = {}
    for record in ranks:
        for one in record.conversions:
            found.setdefault((one.layer, one.projection), {})[record.rank] = one
    return found


def missing_conversions(journal: Journal) -> list[MissingConversion]:
    """What must still be converted before this start may serve; empty when nothing has to be."""
    supervisor = journal.supervisor
    if supervisor is None or not supervisor.weights.lossy:
        return []
    converted = conversions_by_key(journal.ranks)
    missing = []
    for layer in supervisor.checkpoint.moe_layers:
        for projection in Projection:
            ranks = _missing_ranks(layer, converted.get((layer, projection), {}), supervisor)
            if ranks:
                missing.append(MissingConversion(layer=layer, projection=projection, ranks=ranks))
    return missing


def _requantisation(journal: Journal, supervisor: SupervisorRecord) -> Requantisation | None:
    """What the ranks did, where they agree; what was asked of them before they have reported."""
    done = {rank.requantisation for rank in journal.ranks if rank.requantisation is not None}
    return done.pop() if len(done) == 1 else supervisor.requantisation


def _missing_ranks(
    layer: int, by_rank: dict[int, ProjectionConversion], supervisor: SupervisorRecord
) -> list[int]:
    return [rank for rank in supervisor.ranks_with(layer) if rank not in by_rank]


def _layer(key: Key, by_rank: dict[int, ProjectionConversion], supervisor: SupervisorRecord) -> LayerLoss:
    layer, projection = key
    return LayerLoss(
        layer=layer,
        projection=projection,
        missing_ranks=_missing_ranks(layer, by_rank, supervisor),
        ranks=[_rank_loss(rank, one) for rank, one in by_rank.items()],
        **_sums(list(by_rank.values())),
    )


def _rank_loss(rank: int, one: ProjectionConversion) -> RankLoss:
    return RankLoss(
        rank=rank,
        experts=one.experts,
        worst_expert=one.worst_expert,
        worst_expert_relative_mse=one.worst_expert_relative_mse,
        **_sums([one]),
    )


def merged_loss(conversions: list[ProjectionConversion]) -> Loss:
    """What all of them together have lost."""
    return Loss(**_sums(conversions))


def _sums(conversions: list[ProjectionConversion]) -> dict[str, Any]:
    if not conversions:
        return dict.fromkeys(Loss.model_fields)
    groups = sum(one.groups for one in conversions)
    lossless = sum(one.lossless_groups for one in conversions)
    started_at = min(one.started_at for one in conversions)
    ended_at = max(one.ended_at for one in conversions)
    return {
        "groups": groups,
        "lossless_groups": lossless,
        "zero_groups": sum(one.zero_groups for one in conversions),
        "nonfinite_groups": sum(one.nonfinite_groups for one in conversions),
        "clamped_groups": sum(one.clamped_groups for one in conversions),
        "lossless_ratio": ratio(lossless, groups),
        "relative_mse": relative_mse(conversions),
        "max_error": finite(max(one.max_error for one in conversions)),
        "bytes_read": sum(one.bytes_read for one in conversions),
        "bytes_written": sum(one.bytes_written for one in conversions),
        "started_at": started_at,
        "ended_at": ended_at,
        "seconds": seconds_between(started_at, ended_at),
    }
