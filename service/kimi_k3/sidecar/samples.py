# SPDX-License-Identifier: Apache-2.0
"""The value of every metric at one moment, from the journal alone and without any I/O."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import pairwise

from kimi_k3 import __version__
from kimi_k3.host import CgroupMemory, HostMemory, MachineMemory
from kimi_k3.journal.models import RANK_FILE_PATTERN, SCHEMA_VERSION, RankRecord, SupervisorRecord, rank_file
from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar import metrics as m
from kimi_k3.sidecar.acknowledgement import Acknowledgements
from kimi_k3.sidecar.arithmetic import seconds_between
from kimi_k3.sidecar.conversion import conversion_view, served_lossy
from kimi_k3.sidecar.readiness import journal_reasons
from kimi_k3.sidecar.startup import conversions_done, phase_fraction, remaining_seconds
from kimi_k3.sidecar.view import EngineHealth
from kimi_k3.sidecar.warning import KINDS, NONE_GIVEN, warnings_view
from kimi_k3.words.phases import ENDED, Phase
from kimi_k3.words.weights import Projection


@dataclass(frozen=True)
class Observation:
    """Everything that the metrics are made of, at one moment."""

    journal: Journal
    health: EngineHealth | None
    machine: MachineMemory
    now: datetime
    acknowledgements: Acknowledgements = NONE_GIVEN


@dataclass(frozen=True)
class Sample:
    """One series; ``labels`` are the values of the metric's labels, an info's are its content."""

    metric: m.Metric
    labels: tuple[str, ...]
    value: float


Values = Iterator[tuple[m.Metric, tuple[str, ...], float | None]]


def samples(observation: Observation) -> Iterator[Sample]:
    """Every known series; an unknown value has none."""
    yield from present_samples(observation)
    yield from conversion_samples(observation.journal)


def present_samples(observation: Observation) -> Iterator[Sample]:
    """All but :func:`conversion_samples`: few, and different at each moment."""
    yield from _known(_values(observation))


def conversion_samples(journal: Journal) -> Iterator[Sample]:
    """What the conversion did, by layer and projection: most of all series, and the same once it is over."""
    if journal.supervisor is not None and not journal.supervisor.headless:
        yield from _known(_of_conversion(journal, journal.supervisor))


def _known(values: Values) -> Iterator[Sample]:
    for metric, labels, value in values:
        if value is not None:
            yield Sample(metric, labels, float(value))


def _values(seen: Observation) -> Values:
    journal, supervisor = seen.journal, seen.journal.supervisor
    yield m.BUILD, (__version__, platform.python_version(), str(SCHEMA_VERSION)), 1
    yield m.JOURNAL_FAULTS, (), len(journal.faults)
    if supervisor is not None:
        yield from _of_start(supervisor)
        yield m.PHASE_PROGRESS, (), phase_fraction(supervisor, journal.ranks)
        yield m.PHASE_REMAINING, (), remaining_seconds(supervisor, journal.ranks, seen.now)
        yield m.LOSSY, (), served_lossy(journal)
        yield m.ENGINE_FAILURES, (), len(journal.failures)
        # A start that a hang ended keeps since when it hung; what is gone does not stall.
        stalled = supervisor.stalled_since is not None and supervisor.phase not in ENDED
        yield m.ENGINE_STALLED, (), stalled
        yield from _of_plan(supervisor)
        if not supervisor.headless:
            yield from _of_ranks(journal, supervisor)
    yield from _of_engine(seen)
    yield from _of_machine(seen.machine.host, seen.machine.cgroup)


def _of_start(supervisor: SupervisorRecord) -> Values:
    labels = (
        supervisor.profile,
        supervisor.weights,
        supervisor.requantisation.rule if supervisor.requantisation else "",
        supervisor.consent or "",
        supervisor.served_model_name,
        str(supervisor.node),
    )
    yield m.INFO, labels, 1
    yield m.START, (), supervisor.started_at.timestamp()
    yield m.HEARTBEAT, (), supervisor.updated_at.timestamp()
    for phase in Phase:
        yield m.PHASE, (phase,), phase is supervisor.phase
    # By phase: one that stands in the record twice must not become two series of one name.
    changes = supervisor.phases
    for phase, at in {change.phase: change.at for change in changes}.items():
        yield m.PHASE_STARTED, (phase,), at.timestamp()
    finished = {begin.phase: seconds_between(begin.at, end.at) for begin, end in pairwise(changes)}
    for phase, seconds in finished.items():
        yield m.PHASE_DURATION, (phase,), seconds
    if supervisor.ending is not None:
        yield m.EXIT_CODE, (), supervisor.ending.exit_code
    if supervisor.canary is not None:
        yield m.CANARY, (), supervisor.canary.at.timestamp()
        yield m.CANARY_DURATION, (), supervisor.canary.seconds


def _of_plan(supervisor: SupervisorRecord) -> Values:
    planned = supervisor.planned
    if planned is not None:
        for part, size in planned:
            yield m.MEMORY_PLANNED, (part.removesuffix("_bytes"),), size
    yield m.KV_CACHE, (), supervisor.kv_cache_bytes


def _of_ranks(journal: Journal, supervisor: SupervisorRecord) -> Values:
    """Of all ranks, and so told by the first node alone: each series is there once for all nodes."""
    yield m.START_BUDGET, (), supervisor.start_timeout_seconds
    yield m.WORLD_SIZE, (), supervisor.world_size
    yield m.RANKS, (), len(journal.ranks)
    yield m.NODES_EXPECTED, (), supervisor.nodes
    yield m.NODES, (), 1 + len(journal.nodes)
    for record in journal.ranks:
        yield from _of_rank(record)
    yield from _of_progress(journal, supervisor)


def _of_rank(record: RankRecord) -> Values:
    rank = (str(record.rank),)
    yield m.RANK_HEARTBEAT, rank, record.updated_at.timestamp()
    if record.backend is not None:
        yield m.BACKEND, (*rank, record.backend), 1
    if record.proof is not None:
        yield m.KERNEL_ERROR, rank, record.proof.relative_error
    if record.loading is not None:
        yield m.LOADING_BYTES, rank, record.loading.bytes_done
        yield m.LOADING_BYTES_EXPECTED, rank, record.loading.bytes_total
        yield m.LOADING_SHARDS, rank, record.loading.shards_done
        yield m.LOADING_SHARDS_EXPECTED, rank, record.loading.shards_total
    if record.memory is not None:
        labels = (*rank, record.memory.kind)
        yield m.MEMORY_USED, labels, record.memory.used_bytes
        yield m.MEMORY_PEAK, labels, record.memory.peak_bytes
        yield m.MEMORY_CAPACITY, labels, record.memory.total_bytes


def _of_progress(journal: Journal, supervisor: SupervisorRecord) -> Values:
    """A rank that has not reported has converted nothing; of one whose record is not trusted nobody knows."""
    if not supervisor.weights.lossy:
        return
    done = {record.rank: conversions_done(record, supervisor) for record in journal.ranks}
    silent = dict.fromkeys(_silent_ranks(journal, supervisor), 0)
    for rank, count in sorted((silent | done).items()):
        yield m.CONVERSION_PROJECTIONS, (str(rank),), count
        yield m.CONVERSION_PROJECTIONS_EXPECTED, (str(rank),), supervisor.expected_conversions(rank)


def _silent_ranks(journal: Journal, supervisor: SupervisorRecord) -> list[int]:
    """Ranks that will report and of which there is no file, be it a bad one."""
    if not supervisor.ranks_report:
        return []
    present = {rank_file(record.rank) for record in journal.ranks} | {fault.file for fault in journal.faults}
    return [rank for rank in supervisor.ranks_known if rank_file(rank) not in present]


def distrusted_rank(journal: Journal) -> bool:
    """Whether a rank's record was left out: sums over ranks are then no longer known to be 0."""
    return any(fnmatchcase(fault.file, RANK_FILE_PATTERN) for fault in journal.faults)


def _of_conversion(journal: Journal, supervisor: SupervisorRecord) -> Values:
    view = conversion_view(journal)
    yield m.CONVERSION_MODEL_RELATIVE_MSE, (), view.total.relative_mse if view.total else None
    if supervisor.requantisation is not None:
        yield m.CONVERSION_LIMIT_RELATIVE_MSE, (), supervisor.requantisation.rule.limit_relative_mse
    for layer in view.layers:
        labels = (str(layer.layer), layer.projection)
        yield m.CONVERSION_GROUPS, labels, layer.groups
        yield m.CONVERSION_LOSSLESS_GROUPS, labels, layer.lossless_groups
        yield m.CONVERSION_RELATIVE_MSE, labels, layer.relative_mse
        yield m.CONVERSION_MAX_ERROR, labels, layer.max_error
        yield m.CONVERSION_DURATION, labels, layer.seconds
        yield m.CONVERSION_READ, labels, layer.bytes_read
        yield m.CONVERSION_WRITTEN, labels, layer.bytes_written
    if not supervisor.weights.lossy or not supervisor.ranks_report or distrusted_rank(journal):
        return
    converted = {(layer.layer, layer.projection) for layer in view.layers}
    # By a dict: a foreign record may name a layer twice, and two series of one name void the scrape.
    for number in dict.fromkeys(supervisor.checkpoint.moe_layers):
        for projection in Projection:
            if (number, projection) not in converted:
                for metric in _SUMS:
                    yield metric, (str(number), projection), 0


_SUMS = (m.CONVERSION_GROUPS, m.CONVERSION_LOSSLESS_GROUPS, m.CONVERSION_READ, m.CONVERSION_WRITTEN)
"""Of a layer that no rank has converted these are 0; its errors and its duration are unknown."""


def _of_engine(seen: Observation) -> Values:
    health = seen.health
    if journal_reasons(seen.journal, seen.now):
        yield m.READY, (), 0
    elif health is not None:
        yield m.READY, (), health.healthy
    elif seen.journal.supervisor is not None and seen.journal.supervisor.headless:
        yield m.READY, (), 1
    if health is not None:
        yield m.ENGINE_HEALTHY, (), health.healthy
        yield m.ENGINE_CHECK_DURATION, (), health.seconds
    warnings = warnings_view(seen.journal, health, seen.now, seen.acknowledgements).warnings
    standing = Counter(one.code for one in warnings)
    unknown = Counter(one.code for one in warnings if one.acknowledged is None)
    for kind in KINDS:
        yield m.WARNINGS, (kind.code, kind.severity), standing[kind.code]
        if kind.acknowledgeable:
            yield m.UNACKNOWLEDGED, (kind.code, kind.severity), unknown[kind.code]


def _of_machine(host: HostMemory, cgroup: CgroupMemory | None) -> Values:
    yield m.HOST_MEMORY_CAPACITY, (), host.total_bytes
    yield m.HOST_MEMORY_AVAILABLE, (), host.available_bytes
    yield m.HOST_MEMORY_SHMEM, (), host.shmem_bytes
    if cgroup is not None:
        yield m.CGROUP_LIMIT, (), cgroup.limit_bytes
        yield m.CGROUP_USED, (), cgroup.used_bytes
        yield m.CGROUP_SHMEM, (), cgroup.shmem_bytes
        yield m.CGROUP_OOM_KILLS, (), cgroup.oom_kills
