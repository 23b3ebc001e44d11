# SPDX-License-Identifier: Apache-2.0
"""From samples to what Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kimi_k3.sidecar.metrics import METRICS, Metric
from kimi_k3.sidecar.samples import Observation, Sample, samples


class JournalCollector(Collector):
    """Reads the journal at every scrape; ``observe`` does so and must not raise."""

    def __init__(self, observe: Callable[[], Observation]) -> None:
        self._observe = observe

    def describe(self) -> Iterable[Family]:
        """The names, without reading anything."""
        return [_family(metric, []) for metric in METRICS]

    def collect(self) -> Iterable[Family]:
        """One family for every metric that has a value."""
        known: dict[Metric, list[Sample]] = {}
        for sample in samples(self._observe()):
            known.setdefault(sample.metric, []).append(sample)
        return [_family(metric, known[metric]) for metric in METRICS if metric in known]


def make_registry(observe: Callable[[], Observation], *, proc: Path) -> CollectorRegistry:
    """A registry with the sidecar's metrics and those of its own process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JournalCollector(observe))
    ProcessCollector(proc=str(proc), registry=registry)
    return registry


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The scrape's body and content type: OpenMetrics when ``accept`` asks for it, else plain text."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _family(metric: Metric, known: list[Sample]) -> Family:
    if metric.kind == "info":
        info = InfoMetricFamily(metric.name.removesuffix("_info"), metric.help)
        for sample in known:
            info.add_metric([], dict(zip(metric.labels, sample.labels, strict=True)))
        return info
    if metric.kind == "counter":
        counter = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
        for sample in known:
            counter.add_metric(sample.labels, sample.value)
        return counter
    gauge = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for sample in known:
        gauge.add_metric(sample.labels, sample.value)
    return gauge
