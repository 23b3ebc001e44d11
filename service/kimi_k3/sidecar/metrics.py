# SPDX-License-Identifier: Apache-2.0
"""Every metric of the sidecar, once: name, type, help and labels.

``kimi-k3 metrics list``, docs/metrics.md, dashboards and alert rules read :data:`METRICS`. A series whose
value nobody measured is absent, never 0; where 0 is known it stands from the beginning, so that an alert can
be written before it first matters. Sizes are bytes, times seconds, ratios parts of a whole.

No label grows with time: a start is told by when it began, not by its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LAYER = ("layer", "projection")
RANK = ("rank",)


@dataclass(frozen=True)
class Metric:
    """One metric as Prometheus shows it.

    ``name`` is the name of the series, with the suffix that belongs to its type: ``_total`` for a
    counter, ``_info`` for an info. Of a state set exactly one series is 1 and all others are 0; its label is
    called like the metric, as OpenMetrics wants it. Who does not ask for OpenMetrics gets it, and an info, as
    a gauge.
    """

    name: str
    kind: Literal["gauge", "counter", "info", "stateset"]
    help: str
    labels: tuple[str, ...] = ()


BUILD = Metric(
    "kimi_k3_build_info",
    "info",
    "The sidecar that answers: its version, Python's, and that of the journal it reads.",
    ("version", "python", "journal"),
)
INFO = Metric(
    "kimi_k3_deployment_info",
    "info",
    "What is served and how; an empty label does not apply. Absent without a supervisor's record.",
    ("profile", "weights", "scale_rule", "consent", "served_model_name", "node"),
)
READY = Metric(
    "kimi_k3_ready",
    "gauge",
    "1 when traffic may come, else 0, by the journal and the engine's last answer. Absent when the engine "
    "has not been asked lately.",
)
LOSSY = Metric(
    "kimi_k3_lossy", "gauge", "1 when the served experts differ from the checkpoint's values, else 0."
)
WORLD_SIZE = Metric(
    "kimi_k3_ranks_expected",
    "gauge",
    "Ranks (GPUs) of the deployment; as all of ranks, told by the first node.",
)
RANKS = Metric("kimi_k3_ranks", "gauge", "Ranks that have reported in this start.")
NODES_EXPECTED = Metric("kimi_k3_nodes_expected", "gauge", "Nodes of the deployment.")
NODES = Metric("kimi_k3_nodes", "gauge", "Nodes that are part of this start.")
WARNINGS = Metric(
    "kimi_k3_warnings", "gauge", "Warnings that stand now, as /warnings lists them.", ("code", "severity")
)
UNACKNOWLEDGED = Metric(
    "kimi_k3_warnings_unacknowledged",
    "gauge",
    "Of these, those that can be acknowledged and that nobody has.",
    ("code", "severity"),
)

START = Metric("kimi_k3_start_timestamp_seconds", "gauge", "When the present start began.")
START_BUDGET = Metric(
    "kimi_k3_start_budget_seconds",
    "gauge",
    "How long a start may take until ready; then the supervisor ends it. Told by the first node.",
)
HEARTBEAT = Metric(
    "kimi_k3_supervisor_heartbeat_timestamp_seconds", "gauge", "When the supervisor last reported."
)
PHASE = Metric("kimi_k3_phase", "stateset", "1 for the present phase, 0 for the others.", ("kimi_k3_phase",))
PHASE_STARTED = Metric(
    "kimi_k3_phase_started_timestamp_seconds", "gauge", "When a phase of this start began.", ("phase",)
)
PHASE_DURATION = Metric(
    "kimi_k3_phase_duration_seconds", "gauge", "How long a finished phase of this start took.", ("phase",)
)
PHASE_PROGRESS = Metric(
    "kimi_k3_phase_progress_ratio",
    "gauge",
    "Progress of the present phase, 0 to 1, as /startupz tells it. Absent where nothing is counted.",
)
PHASE_REMAINING = Metric(
    "kimi_k3_phase_remaining_seconds",
    "gauge",
    "Until the end of the present phase at the measured rate. Absent where that cannot be told.",
)
EXIT_CODE = Metric("kimi_k3_exit_code", "gauge", "Exit code of the start; absent while it lives.")
CANARY = Metric("kimi_k3_canary_timestamp_seconds", "gauge", "When the canary completion succeeded.")
CANARY_DURATION = Metric("kimi_k3_canary_duration_seconds", "gauge", "How long the canary completion took.")

ENGINE_HEALTHY = Metric(
    "kimi_k3_engine_healthy",
    "gauge",
    "1 when the engine's /health last answered 200, else 0. Absent when it has not been asked lately.",
)
ENGINE_CHECK_DURATION = Metric(
    "kimi_k3_engine_health_duration_seconds", "gauge", "How long the engine's last /health took."
)
ENGINE_FAILURES = Metric(
    "kimi_k3_engine_failures", "gauge", "Failures that the engine's processes reported in this start."
)
ENGINE_STALLED = Metric(
    "kimi_k3_engine_stalled",
    "gauge",
    "1 while requests make no progress or a process of the engine is stopped, else 0, as once it has ended.",
)
JOURNAL_FAULTS = Metric(
    "kimi_k3_journal_faults", "gauge", "Files of the state directory that are not trusted and left out."
)

RANK_HEARTBEAT = Metric(
    "kimi_k3_rank_heartbeat_timestamp_seconds", "gauge", "When a rank last reported.", RANK
)
BACKEND = Metric(
    "kimi_k3_rank_backend_info",
    "info",
    "Which kernels compute the experts of a rank. Absent until the rank has chosen.",
    ("rank", "backend"),
)
KERNEL_ERROR = Metric(
    "kimi_k3_kernel_relative_error_ratio",
    "gauge",
    "Largest relative error of a token by which a rank's kernels differed from float32 before loading.",
    RANK,
)
LOADING_BYTES = Metric(
    "kimi_k3_loading_bytes", "gauge", "Bytes of the checkpoint that a rank has read.", RANK
)
LOADING_BYTES_EXPECTED = Metric(
    "kimi_k3_loading_expected_bytes", "gauge", "Bytes of the checkpoint that a rank will read.", RANK
)
LOADING_SHARDS = Metric("kimi_k3_loading_shards", "gauge", "Shards that a rank has read.", RANK)
LOADING_SHARDS_EXPECTED = Metric(
    "kimi_k3_loading_shards_expected", "gauge", "Shards that a rank will read.", RANK
)

CONVERSION_PROJECTIONS = Metric(
    "kimi_k3_conversion_projections",
    "gauge",
    "Layer projections that a rank has converted to int4, 0 before it reports. Absent when none are to be.",
    RANK,
)
CONVERSION_PROJECTIONS_EXPECTED = Metric(
    "kimi_k3_conversion_projections_expected",
    "gauge",
    "Layer projections that a rank must convert. Absent when none are to be.",
    RANK,
)
CONVERSION_GROUPS = Metric(
    "kimi_k3_conversion_groups", "gauge", "Converted groups of 32 weights, over ranks.", LAYER
)
CONVERSION_LOSSLESS_GROUPS = Metric(
    "kimi_k3_conversion_lossless_groups",
    "gauge",
    "Converted groups whose every value survived exactly, over ranks.",
    LAYER,
)
CONVERSION_RELATIVE_MSE = Metric(
    "kimi_k3_conversion_relative_mse_ratio",
    "gauge",
    "Sum of squared errors over sum of squared weights, over ranks.",
    LAYER,
)
CONVERSION_MODEL_RELATIVE_MSE = Metric(
    "kimi_k3_conversion_model_relative_mse_ratio",
    "gauge",
    "The same over all layers and ranks converted so far.",
)
CONVERSION_LIMIT_RELATIVE_MSE = Metric(
    "kimi_k3_conversion_limit_relative_mse_ratio",
    "gauge",
    "More than that the scale rule has not lost of any weights that were tried. Absent when none are to be.",
)
CONVERSION_MAX_ERROR = Metric(
    "kimi_k3_conversion_max_error", "gauge", "Largest |w - w'|, over ranks, in the weights' unit.", LAYER
)
CONVERSION_DURATION = Metric(
    "kimi_k3_conversion_duration_seconds",
    "gauge",
    "From the first rank's begin to the last rank's end.",
    LAYER,
)
CONVERSION_READ = Metric(
    "kimi_k3_conversion_read_bytes", "gauge", "Bytes of checkpoint weights converted, over ranks.", LAYER
)
CONVERSION_WRITTEN = Metric(
    "kimi_k3_conversion_written_bytes", "gauge", "Bytes of int4 weights and scales, over ranks.", LAYER
)

MEMORY_USED = Metric(
    "kimi_k3_memory_used_bytes",
    "gauge",
    "Memory of a rank; kind device is the accelerator, host the process's resident set.",
    ("rank", "kind"),
)
MEMORY_PEAK = Metric("kimi_k3_memory_peak_bytes", "gauge", "The most that a rank has used.", ("rank", "kind"))
MEMORY_CAPACITY = Metric(
    "kimi_k3_memory_capacity_bytes", "gauge", "What a rank could use at most.", ("rank", "kind")
)
MEMORY_PLANNED = Metric(
    "kimi_k3_memory_planned_bytes",
    "gauge",
    "What the plan gives each rank; part limit is the whole GPU. Absent where nothing was planned.",
    ("part",),
)
KV_CACHE = Metric(
    "kimi_k3_kv_cache_bytes", "gauge", "What the engine announced as the cache of its smallest rank."
)
HOST_MEMORY_CAPACITY = Metric("kimi_k3_host_memory_capacity_bytes", "gauge", "Memory of the machine.")
HOST_MEMORY_AVAILABLE = Metric(
    "kimi_k3_host_memory_available_bytes", "gauge", "Memory of the machine to be had without swapping."
)
HOST_MEMORY_SHMEM = Metric(
    "kimi_k3_host_memory_shmem_bytes", "gauge", "Shared memory of the machine, tmpfs included."
)
CGROUP_LIMIT = Metric(
    "kimi_k3_cgroup_memory_limit_bytes", "gauge", "Limit of the sidecar's control group; absent without one."
)
CGROUP_USED = Metric(
    "kimi_k3_cgroup_memory_used_bytes", "gauge", "Memory of the sidecar's control group in use."
)
CGROUP_SHMEM = Metric(
    "kimi_k3_cgroup_memory_shmem_bytes",
    "gauge",
    "Shared memory of the sidecar's control group, which counts towards its limit.",
)
CGROUP_OOM_KILLS = Metric(
    "kimi_k3_cgroup_memory_oom_kills_total",
    "counter",
    "Processes of the sidecar's control group that the kernel killed for memory.",
)

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""Every metric, in the order above; ``process_*`` of the sidecar itself come beside them."""
