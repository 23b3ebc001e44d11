# SPDX-License-Identifier: Apache-2.0
"""Every series that our Prometheus may hold: name, type and labels, each from where it is defined.

The sidecar's are ``kimi_k3.sidecar.metrics``. vLLM's are read from the installed package and must be in the
list of 0.33.0, too: the CPU runs 0.32.0, the ROCm image 0.33.0. The exporter's are in ``data/``, with their
source.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import prometheus_client
import prometheus_fastapi_instrumentator
from prometheus_client import Counter, Histogram, Summary

from kimi_k3.journal.models import PlannedMemory
from kimi_k3.sidecar.metrics import METRICS
from kimi_k3.sidecar.warning import KINDS
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import Projection
from tests.observability.vllm_source import finish_reasons, vllm_families

DATA = Path(__file__).parent / "data"
VLLM_033 = DATA / "vllm-0.33.0-metrics.tsv"
EXPORTER = DATA / "amd-device-metrics-exporter-1.5.1.tsv"

Kind = Literal["gauge", "share", "accumulated", "counter", "histogram", "summary"]
"""A share is a gauge of parts of a whole; accumulated is a gauge that only grows, as a counter does."""

TARGET_LABELS = frozenset({"job", "instance", "namespace", "release"})
"""Of every series, wherever it is scraped: in the cluster the operator sets more, which compose has not."""

EXPORTER_LABELS = frozenset(
    {"gpu_id", "gpu_partition_id", "gpu_compute_partition_type", "gpu_memory_partition_type", "hostname"}
    | {"card_model", "serial_number", "deployment_mode", "namespace", "pod", "container"}
    | {"job_id", "job_user", "job_partition"}
)
"""``gpuMandatoryLables`` of the exporter; its ``namespace`` and ``pod`` are those of the GPU's user."""

ANY = "any"

_VALUES = {
    "kimi_k3_phase": frozenset(phase.value for phase in Phase),
    "phase": frozenset(phase.value for phase in Phase),
    "code": frozenset(kind.code for kind in KINDS),
    "severity": frozenset(kind.severity for kind in KINDS),
    "projection": frozenset(projection.value for projection in Projection),
    "kind": frozenset({"host", "device"}),
    "part": frozenset(name.removesuffix("_bytes") for name in PlannedMemory.model_fields),
}


@dataclass(frozen=True)
class Family:
    """One metric as its program defines it.

    Attributes:
        name: as in an exposition's TYPE line of the text format: a counter's ends with ``_total``.
        kind: what may be done with it.
        labels: its own; ``None`` if nobody knows them.
        source: the program that tells it, or :data:`ANY`; series of two never have the same ``instance``.
        values: of those labels whose values are a closed set.
    """

    name: str
    kind: Kind
    labels: frozenset[str] | None
    source: str
    values: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))

    def series(self) -> Iterator[tuple[str, Series]]:
        """The series of this family by name."""
        labels = None if self.labels is None else self.labels | TARGET_LABELS
        if self.kind not in ("histogram", "summary"):
            yield self.name, Series(self, self.kind, labels)
            return
        for part in ("_sum", "_count"):
            yield self.name + part, Series(self, "counter", labels)
        if self.kind == "histogram":
            yield self.name + "_bucket", Series(self, "counter", labels and labels | {"le"}, bucket=True)


@dataclass(frozen=True)
class Series:
    """What an expression may name."""

    family: Family
    kind: Kind
    labels: frozenset[str] | None
    bucket: bool = False


@dataclass(frozen=True)
class Known:
    """All series by name; ``not_series`` are names that look like one, and what to write instead."""

    series: Mapping[str, Series]
    not_series: Mapping[str, str]

    def with_families(self, families: Iterable[Family]) -> Known:
        """These, too: of a recording rule, for one."""
        more = of_families(families)
        return Known({**self.series, **more.series}, {**self.not_series, **more.not_series})

    def prefixed(self, prefix: str) -> Known:
        """The same where the exporter puts ``prefix`` before its names."""
        renamed = {
            (prefix + name if one.family.source == "exporter" else name): one
            for name, one in self.series.items()
        }
        return Known(renamed, self.not_series)


def of_families(families: Iterable[Family]) -> Known:
    """Everything that these families expose."""
    series: dict[str, Series] = {}
    not_series: dict[str, str] = {}
    for family in families:
        series.update(family.series())
        name = family.name
        if family.kind == "histogram":
            not_series[name] = f"is a histogram: write {name}_bucket, {name}_sum or {name}_count"
        elif family.kind == "summary":
            # prometheus_client computes no quantiles, so there is no series of the summary's own name.
            not_series[name] = f"is a summary: write {name}_sum or {name}_count"
        elif family.kind == "counter":
            bare = family.name.removesuffix("_total")
            not_series[bare] = f"is a counter, whose series is {family.name}"
    return Known(series, {name: text for name, text in not_series.items() if name not in series})


def is_share(name: str) -> bool:
    """Whether a metric's name says that it is a part of a whole."""
    return name.endswith(("_ratio", "_perc", "_percent", "_percentage"))


@cache
def known() -> Known:
    """Every series of ours, of vLLM, of AMD's exporter and of Prometheus itself."""
    return of_families([*sidecar(), *engine(), *exporter(), *prometheus(), *processes()])


def sidecar() -> list[Family]:
    """Our own; an info and a state set are gauges to Prometheus."""
    return [
        Family(
            metric.name,
            "counter" if metric.kind == "counter" else "share" if is_share(metric.name) else "gauge",
            frozenset(metric.labels),
            "sidecar",
            {label: _VALUES[label] for label in metric.labels if label in _VALUES},
        )
        for metric in METRICS
    ]


def engine() -> list[Family]:
    """vLLM's that both its versions have, and those of its HTTP server."""
    newer = vllm_033()
    reasons = {"finished_reason": finish_reasons(vllm_package())}
    families = [
        Family(
            exposed(name, kind),
            "share" if kind == "gauge" and is_share(name) else kind,
            labels,
            "engine",
            {label: values for label, values in reasons.items() if labels and label in labels},
        )
        for name, (kind, labels) in vllm_families(vllm_package()).items()
        if newer.get(name) == kind
    ]
    return [*families, *http()]


def vllm_package() -> Path:
    """Where the installed vLLM is; it is not imported."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0])


def exposed(name: str, kind: Kind) -> str:
    """What Prometheus sees of a name in vLLM's source: the client adds ``_total`` to a counter's."""
    return name.removesuffix("_total") + "_total" if kind == "counter" else name


def vllm_033() -> dict[str, Kind]:
    """Name in the source and type of 0.33.0's metrics."""
    kinds: dict[str, Kind] = {
        "_counter_cls": "counter",
        "Counter": "counter",
        "_gauge_cls": "gauge",
        "Gauge": "gauge",
        "?": "gauge",
        "_histogram_cls": "histogram",
        "Histogram": "histogram",
    }
    return {name: kinds[made] for name, made, _ in _rows(VLLM_033)}


def http() -> list[Family]:
    """Of the requests, by prometheus-fastapi-instrumentator, which vLLM serves with its defaults."""
    registry = prometheus_client.CollectorRegistry()
    prometheus_fastapi_instrumentator.metrics.default(registry=registry)
    made: dict[type, Kind] = {Counter: "counter", Histogram: "histogram", Summary: "summary"}
    return [
        Family(exposed(one._name, made[type(one)]), made[type(one)], frozenset(one._labelnames), "engine")
        for one in registry._collector_to_names
        if isinstance(one, Counter | Histogram | Summary)
    ]


def exporter() -> list[Family]:
    """Of AMD's device-metrics-exporter, without its optional prefix."""
    kinds: dict[str, Kind] = {"gauge": "gauge", "share": "share", "accumulated": "accumulated"}
    return [
        Family(name, kinds[kind], EXPORTER_LABELS | set(filter(None, labels.split(","))), "exporter")
        for name, kind, labels, _ in _rows(EXPORTER)
    ]


def prometheus() -> list[Family]:
    """What Prometheus itself tells of each target and of its alerts."""
    of_targets = ("up", "scrape_duration_seconds", "scrape_samples_scraped")
    alerts = Family("ALERTS", "gauge", frozenset({"alertname", "alertstate", "severity"}), ANY)
    return [*(Family(name, "gauge", frozenset(), ANY) for name in of_targets), alerts]


def processes() -> list[Family]:
    """Of the sidecar's and vLLM's own processes, by prometheus_client."""
    kinds: dict[str, Kind] = {"gauge": "gauge", "counter": "counter"}
    return [
        Family(exposed(one.name, kinds[one.type]), kinds[one.type], frozenset(), ANY)
        for one in prometheus_client.REGISTRY.collect()
        if one.name.startswith("process_")
    ]


def _rows(path: Path) -> Iterator[list[str]]:
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            yield line.split("\t")
