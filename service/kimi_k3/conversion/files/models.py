# SPDX-License-Identifier: Apache-2.0
"""The JSON that the two commands write, and the arithmetic that sums it up. Pure.

Groups are runs of 32 weights along the input dimension. A number that cannot be given is ``null``, never 0.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat

from kimi_k3 import __version__
from kimi_k3.conversion.loss import Loss, total, worst
from kimi_k3.words.weights import Int4Layout, Projection, Requantisation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SCHEMA_VERSION: Final = 1

Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Model(BaseModel):
    """Strict, immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LossFigures(_Model):
    """A :class:`~kimi_k3.conversion.loss.Loss` in JSON, with what is derived from it.

    ``relative_mse`` is ``squared_error / energy``, ``null`` when every weight is zero.
    """

    groups: Count
    lossless_groups: Count
    zero_groups: Count
    nonfinite_groups: Count
    clamped_groups: Count
    squared_error: NonNegativeFloat
    energy: NonNegativeFloat
    max_error: NonNegativeFloat
    relative_mse: NonNegativeFloat | None

    @classmethod
    def of(cls, loss: Loss) -> Self:
        """The figures of ``loss``."""
        return cls(**asdict(loss), relative_mse=loss.relative_mse)

    @property
    def loss(self) -> Loss:
        """What adds up."""
        return Loss(**self.model_dump(exclude={"relative_mse"}))


class Device(StrEnum):
    """What converts a file; ``cuda`` is torch's word for ROCm devices as well."""

    CPU = "cpu"
    CUDA = "cuda"


class FileReport(_Model):
    """What ``convert-file`` says about its conversion; ``experts`` in the order of the file."""

    schema_version: Literal[1] = SCHEMA_VERSION
    version: str = __version__
    requantisation: Requantisation
    layout: Int4Layout
    device: Device
    total: LossFigures
    experts: tuple[LossFigures, ...]


class WorstExpert(_Model):
    """The expert, from 0, whose relative MSE is the highest, the first of equals."""

    layer: Count
    projection: Projection
    expert: Count
    relative_mse: NonNegativeFloat


class ProjectionReport(_Model):
    """One projection of one layer; ``w13`` is the checkpoint's w1 and w3 (gate and up) together.

    Bytes are those of nibbles and scales: one byte per group in MXFP4, two in int4.
    """

    layer: Count
    projection: Projection
    experts: Count
    bytes_mxfp4: Count
    bytes_int4: Count
    loss: LossFigures
    worst_expert: WorstExpert | None


class Report(_Model):
    """What ``convert-report`` writes.

    ``checkpoint`` is a hash of the checkpoint's config.json and index (of its header, if it has no index), so
    it does not depend on where the checkpoint lies. Counts and bytes are exact, sums correctly rounded.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    version: str = __version__
    checkpoint: str
    requantisation: Requantisation
    layers: tuple[Count, ...]
    projections: tuple[ProjectionReport, ...]
    totals: dict[Projection, LossFigures]
    total: LossFigures
    bytes_mxfp4: Count
    bytes_int4: Count
    worst_expert: WorstExpert | None


def summarise_projection(
    layer: int, projection: Projection, losses: Mapping[int, Loss], *, bytes_mxfp4: int
) -> ProjectionReport:
    """What one projection costs.

    Args:
        layer: its number, from 0.
        losses: per expert number.
        bytes_mxfp4: of the nibbles and scales in the checkpoint.
    """
    loss = total(losses.values())
    highest = worst(losses)
    return ProjectionReport(
        layer=layer,
        projection=projection,
        experts=len(losses),
        bytes_mxfp4=bytes_mxfp4,
        # One more byte for every scale: bf16 in the place of E8M0.
        bytes_int4=bytes_mxfp4 + loss.groups,
        loss=LossFigures.of(loss),
        worst_expert=None
        if highest is None
        else WorstExpert(layer=layer, projection=projection, expert=highest[0], relative_mse=highest[1]),
    )


def summarise(checkpoint: str, requantisation: Requantisation, parts: Iterable[ProjectionReport]) -> Report:
    """The report of all ``parts``, sorted by layer and projection."""
    order = list(Projection)
    ordered = tuple(sorted(parts, key=lambda part: (part.layer, order.index(part.projection))))
    highest = [part.worst_expert for part in ordered if part.worst_expert is not None]
    return Report(
        checkpoint=checkpoint,
        requantisation=requantisation,
        layers=tuple(dict.fromkeys(part.layer for part in ordered)),
        projections=ordered,
        totals={
            projection: LossFigures.of(
                total(part.loss.loss for part in ordered if part.projection is projection)
            )
            for projection in order
        },
        total=LossFigures.of(total(part.loss.loss for part in ordered)),
        bytes_mxfp4=sum(part.bytes_mxfp4 for part in ordered),
        bytes_int4=sum(part.bytes_int4 for part in ordered),
        worst_expert=max(highest, key=lambda expert: expert.relative_mse, default=None),
    )


class ProgressLine(_Model):
    """Any further line of a progress file: a finished projection, and which files it was measured in."""

    shards: str
    part: ProjectionReport


class ProgressHeader(_Model):
    """First line of a progress file. Figures of runs whose headers are equal may be mixed.

    ``directory`` is where the checkpoint lies: ``checkpoint`` is the same for others of its architecture.
    """

    kind: Literal["kimi-k3 convert-report"] = "kimi-k3 convert-report"
    schema_version: Literal[1] = SCHEMA_VERSION
    version: str = __version__
    directory: str
    checkpoint: str
    requantisation: Requantisation
