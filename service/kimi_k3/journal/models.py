# SPDX-License-Identifier: Apache-2.0
"""What stands in the state directory: one file per writer, each a versioned record.

The journal is the only contract between the engine's processes, the supervisor and the sidecar.
A number that nobody measured is ``None`` (JSON ``null``), never 0. Times are UTC. Every record
names the start it belongs to (``start_id``), so a file left behind by an earlier start is seen as
such and never mixed into the present one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, FailFast, Field, NonNegativeFloat, ValidationError

from kimi_k3.words.phases import ENDED, Phase
from kimi_k3.words.weights import ConsentSource, Projection, Requantisation, Weights

SCHEMA_VERSION: Final = 1
SUPERVISOR_FILE = "supervisor.json"
RANK_FILE_PATTERN = "rank-*.json"
FAILURE_FILE_PATTERN = "failure-*.json"
NODE_FILE_PATTERN = "node-*.json"
SUMMARY_MARK = "kimi-k3: rank summary: "

MAX_NODES: Final = 64

# Bounded, so that a foreign record can neither overflow a float nor make a reader build a huge list.
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Rank = Annotated[int, Field(ge=0, lt=1024)]
WorldSize = Annotated[int, Field(ge=1, le=1024)]
NodeCount = Annotated[int, Field(ge=1, le=MAX_NODES)]
Node = Annotated[int, Field(ge=0, lt=MAX_NODES)]
StartId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
LayerIndices = Annotated[tuple[Count, ...], Field(max_length=1024)]


def rank_file(rank: int) -> str:
    """File name of one rank's record."""
    return f"rank-{rank:04d}.json"


def node_file(node: int) -> str:
    """File name of what another node told the first one."""
    return f"node-{node:04d}.json"


def failure_file(pid: int) -> str:
    """File name of the failure that the engine process ``pid`` reported."""
    return f"failure-{pid}.json"


class Record(BaseModel):
    """Base of everything in the journal: strict, immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PhaseChange(Record):
    """A phase and the moment it began."""

    phase: Phase
    at: AwareDatetime


class MemoryReading(Record):
    """Memory of one rank at one moment, in bytes.

    ``device`` readings come from the accelerator's allocator, ``host`` readings are the process's
    resident set.
    """

    kind: Literal["host", "device"]
    used_bytes: Count
    peak_bytes: Count | None = None
    total_bytes: Count | None = None


class Loading(Record):
    """How far one rank has read the checkpoint; ``began_at`` is when it began to read."""

    bytes_done: Count
    bytes_total: Count | None
    shards_done: Count
    shards_total: Count | None
    began_at: AwareDatetime | None = None


class ProjectionConversion(Record):
    """The conversion of one projection of one layer on one rank.

    ``relative_mse`` is sum((w - w')^2) / sum(w^2) over the rank's experts, where w are the
    checkpoint's values and w' what the kernel multiplies with; ``None`` when all weights are zero.
    ``max_error`` is max |w - w'|. Groups are runs of 32 weights along the input dimension; those with NaN or
    infinite values (``nonfinite_groups``) are in no other figure. ``worst_expert`` counts from 0 on the rank;
    ``None`` when all weights are zero.
    """

    layer: Count
    projection: Projection
    started_at: AwareDatetime
    ended_at: AwareDatetime
    experts: Count
    bytes_read: Count
    bytes_written: Count
    groups: Count
    lossless_groups: Count
    zero_groups: Count
    nonfinite_groups: Count
    clamped_groups: Count
    squared_error: NonNegativeFloat
    energy: NonNegativeFloat
    max_error: NonNegativeFloat
    worst_expert: Count | None = None
    worst_expert_relative_mse: NonNegativeFloat | None = None
    memory_before: MemoryReading | None = None
    memory_after: MemoryReading | None = None

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return (self.ended_at - self.started_at).total_seconds()

    @property
    def relative_mse(self) -> float | None:
        """Relative mean squared error, or ``None`` when every weight is zero."""
        return self.squared_error / self.energy if self.energy > 0 else None


def relative_mse(conversions: Iterable[ProjectionConversion]) -> float | None:
    """Sum of squared errors over sum of squared weights; ``None`` if that is no number."""
    done = list(conversions)
    energy = sum(one.energy for one in done)
    error = sum(one.squared_error for one in done)
    return error / energy if energy > 0 and math.isfinite(error / energy) else None


class KernelProof(Record):
    """How far the experts' kernel was from float32 before anything was loaded.

    Errors are the largest relative error of a token; ``None`` if the answer was no number, or nobody asked.

    Attributes:
        relative_error: with scales that are not negative.
        relative_error_with_signs: with scales of both signs.
        signs_right: whether the kernel is right with both signs; ``None`` if nobody asked.
    """

    relative_error: NonNegativeFloat
    relative_error_with_signs: NonNegativeFloat | None
    signs_right: bool | None


class RankRecord(Record):
    """What one engine worker (one GPU) reports.

    ``requantisation`` is what it did, ``backend`` the name of the kernels that compute the experts.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    start_id: StartId
    rank: Rank
    pid: Integer
    updated_at: AwareDatetime
    weights: Weights
    requantisation: Requantisation | None
    backend: str | None = None
    proof: KernelProof | None = None
    phases: Annotated[tuple[PhaseChange, ...], FailFast()] = ()
    loading: Loading | None = None
    conversions: Annotated[tuple[ProjectionConversion, ...], FailFast()] = ()
    memory: MemoryReading | None = None

    @property
    def phase(self) -> Phase | None:
        """The rank's present phase, if it has reported one."""
        return self.phases[-1].phase if self.phases else None

    def summary(self) -> RankSummary:
        """What the supervisor has to know before it lets the rank serve."""
        return RankSummary(
            start_id=self.start_id,
            rank=self.rank,
            weights=self.weights,
            requantisation=self.requantisation,
            signs_refused=self.proof is not None and self.proof.signs_right is False,
            converted=tuple((done.layer, done.projection) for done in self.conversions),
        )


class RankSummary(Record):
    """What a rank serves, in one line of the engine's log.

    A rank prints it when its weights are in place, so that a state directory that has become full or
    read-only does not end a start. ``signs_refused``: its kernel computes negative scales wrongly, so it was
    converted without them.
    """

    start_id: StartId
    rank: Rank
    weights: Weights
    requantisation: Requantisation | None
    signs_refused: bool = False
    converted: tuple[tuple[Count, Projection], ...]

    def line(self) -> str:
        """The line, without a line break."""
        return SUMMARY_MARK + self.model_dump_json()

    @classmethod
    def in_line(cls, line: str) -> RankSummary | None:
        """The summary in a line of the log, whatever stands before it, or ``None``."""
        _, mark, text = line.partition(SUMMARY_MARK)
        if not mark:
            return None
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None


class FailureRecord(Record):
    """A failure that one of the engine's processes reported before it gave up."""

    schema_version: Literal[1] = SCHEMA_VERSION
    start_id: StartId
    pid: Integer
    at: AwareDatetime
    what: str
    remedy: str


class CheckpointSummary(Record):
    """What the supervisor knew of the checkpoint when it started.

    ``name`` is that of its directory; where that is, is nobody's business who may read what is served.
    """

    name: str
    total_bytes: Count
    shards: Count
    decoder_layers: Count
    moe_layers: LayerIndices
    experts: Count


class Canary(Record):
    """The completion that proved this start can answer."""

    at: AwareDatetime
    seconds: NonNegativeFloat
    completion_tokens: Count


class Explanation(Record):
    """What the diagnosis made of the engine's output when it died.

    ``name`` is the row of docs/failures.md. ``line`` counts the lines of this start's output, which are those
    of ``engine.log`` while that has not become too large; it and ``text`` are ``None`` where the exit code
    alone told.
    """

    name: str
    cause: str
    remedy: str
    line: Count | None = None
    text: str | None = None


class Ending(Record):
    """How a start ended; ``explanation`` is there when the engine died of something known."""

    at: AwareDatetime
    exit_code: Integer
    reason: str
    explanation: Explanation | None = None


class EarlierStart(Record):
    """How the start before this one went in the same state directory.

    ``phase`` is the last one that it reported: failed, stopped, or, without an ``ending``, the one in which
    its supervisor was killed. ``reached`` is the last one before its end. ``updated_at`` is when it was last
    heard of.
    """

    start_id: StartId
    started_at: AwareDatetime
    updated_at: AwareDatetime
    phase: Phase
    reached: Phase
    ending: Ending | None


class Step(Record):
    """What is done within a phase, as vLLM's output announced it.

    ``done`` and ``total`` count what the step is about (graphs); ``None`` where nobody counts.
    """

    phase: Phase
    name: str
    since: AwareDatetime
    done: Count | None = None
    total: Count | None = None


class PlannedMemory(Record):
    """What the plan gives one rank, in bytes; ``None`` where it does not say.

    Attributes:
        weights_bytes: of the weights that stay.
        transient_bytes: what loading and converting take beyond them at their peak.
        step_bytes: estimated peak of one step of the model.
        kv_cache_bytes: left for the cache.
        limit_bytes: of the GPU.
    """

    weights_bytes: Count
    transient_bytes: Count
    step_bytes: Count | None
    kv_cache_bytes: Count | None
    limit_bytes: Count | None


class Notice(Record):
    """Something that the checks before the start found odd, and let pass.

    Attributes:
        check: its stable name.
        what: the evidence, on one line.
        remedy: what to do.
    """

    check: str
    what: str
    remedy: str


class SupervisorRecord(Record):
    """What the supervisor reports; rewritten at least every ``HEARTBEAT_SECONDS``.

    ``ranks_report`` is false where vLLM serves by itself, without the engine plugin. The start may take
    ``start_timeout_seconds`` until it is ready. ``planned`` is of one rank, ``kv_cache_bytes`` what vLLM
    announced for its smallest one. ``stalled_since`` is since when requests make no progress, or one of the
    engine's processes is stopped.

    A deployment over several ``nodes`` has a supervisor on each, of which this is that of ``node``. The
    first node, 0, serves the API, so ``engine_url`` is ``None`` on the others. ``stages`` are the MoE layers
    of each pipeline stage, and ``stage_ranks`` the ranks that share one; no stages mean that every rank has
    all layers. ``leader_silent_since`` is since when another node hears nothing new of the first one.
    ``versions`` and ``options`` are what all nodes must have alike: the versions of what computes, and a
    digest of each option of the engine by its name. ``hardware`` is what this node computes on, in words.
    ``previous`` is the start before, if its record was there.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    start_id: StartId
    pid: Integer
    started_at: AwareDatetime
    updated_at: AwareDatetime
    profile: str
    checkpoint: CheckpointSummary
    served_model_name: str
    weights: Weights
    requantisation: Requantisation | None
    consent: ConsentSource | None
    world_size: WorldSize
    nodes: NodeCount = 1
    node: Node = 0
    stages: Annotated[tuple[LayerIndices, ...], Field(max_length=1024)] = ()
    stage_ranks: WorldSize = 1
    versions: Annotated[dict[str, str], Field(max_length=64)] = {}
    options: Annotated[dict[str, str], Field(max_length=1024)] = {}
    hardware: Annotated[str, Field(max_length=256)] | None = None
    ranks_report: bool = True
    engine_url: str | None
    engine_pid: Integer | None = None
    start_timeout_seconds: NonNegativeFloat | None = None
    planned: PlannedMemory | None = None
    kv_cache_bytes: Count | None = None
    notices: Annotated[tuple[Notice, ...], FailFast()] = ()
    phases: Annotated[tuple[PhaseChange, ...], FailFast()] = ()
    step: Step | None = None
    canary: Canary | None = None
    stalled_since: AwareDatetime | None = None
    leader_silent_since: AwareDatetime | None = None
    ending: Ending | None = None
    previous: EarlierStart | None = None

    @property
    def phase(self) -> Phase:
        """The present phase of the deployment."""
        return self.phases[-1].phase if self.phases else Phase.PENDING

    def as_earlier(self) -> EarlierStart:
        """What the next start keeps of this one."""
        before_the_end = (change.phase for change in reversed(self.phases) if change.phase not in ENDED)
        return EarlierStart(
            start_id=self.start_id,
            started_at=self.started_at,
            updated_at=self.updated_at,
            phase=self.phase,
            reached=next(before_the_end, Phase.PENDING),
            ending=self.ending,
        )

    @property
    def headless(self) -> bool:
        """Whether this node computes for the first one and answers nobody itself."""
        return self.node > 0

    @property
    def ranks_here(self) -> range:
        """Ranks of this node; vLLM numbers them node by node."""
        each = self.world_size // self.nodes
        return range(self.node * each, (self.node + 1) * each)

    @property
    def ranks_known(self) -> range:
        """Ranks whose records are in this node's journal: all on the first node, its own on another."""
        return self.ranks_here if self.headless else range(self.world_size)

    def moe_layers_of(self, rank: int) -> LayerIndices:
        """The MoE layers that a rank holds; ranks are numbered by data, pipeline, then tensor parallelism."""
        if not self.stages:
            return self.checkpoint.moe_layers
        return self.stages[rank // self.stage_ranks % len(self.stages)]

    def ranks_with(self, layer: int) -> list[int]:
        """Those of :attr:`ranks_known` that hold a MoE layer."""
        return [rank for rank in self.ranks_known if layer in self.moe_layers_of(rank)]

    def expected_conversions(self, rank: int) -> int:
        """Conversions a rank must report before this start may serve: two per MoE layer, or none."""
        return 2 * len(self.moe_layers_of(rank)) if self.weights.lossy else 0

    def all_expected_conversions(self) -> int:
        """The same of all :attr:`ranks_known`."""
        return sum(map(self.expected_conversions, self.ranks_known))


class NodeReport(Record):
    """What a node tells the first one: ``PUT /nodes/NODE`` of its sidecar, which answers with its own record.

    ``start_id`` is the first node's start that it has joined; ``None`` only asks for that. ``summaries`` are
    of its ranks whose records do not say the same, since they could not be written.
    """

    start_id: StartId | None
    supervisor: SupervisorRecord
    summaries: Annotated[tuple[RankSummary, ...], Field(max_length=1024)] = ()


class NodeRecord(Record):
    """What another node's supervisor last told the first node's.

    ``start_id`` is the first node's, ``supervisor`` that node's own record, ``heard_at`` by the first node's
    clock. ``superseded``: that node has begun anew meanwhile, so its ranks of this start are gone.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    start_id: StartId
    node: Annotated[int, Field(ge=1, lt=MAX_NODES)]
    heard_at: AwareDatetime
    superseded: bool = False
    supervisor: SupervisorRecord
    summaries: Annotated[tuple[RankSummary, ...], Field(max_length=1024)] = ()


HEARTBEAT_SECONDS = 2.0
"""The supervisor rewrites its record at least this often."""

NODE_SILENT_SECONDS = 5.0
"""Another node that has told nothing for so long, of one word a second, may be gone."""

STALE_AFTER_SECONDS = 15.0
"""A record of the supervisor older than this means that the supervisor no longer runs."""


def utc_iso(moment: datetime) -> str:
    """ISO 8601 text of a UTC moment, to the millisecond."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
