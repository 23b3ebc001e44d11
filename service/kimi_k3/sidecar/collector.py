# SPDX-License-Identifier: Apache-2.0
"""From samples to what Prometheus reads."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    StateSetMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kimi_k3.journal.models import RankRecord
from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.metrics import METRICS, Metric
from kimi_k3.sidecar.samples import Observation, Sample, conversion_samples, distrusted_rank, present_samples


class ConversionMemo:
    """The samples of the conversion, made anew only when a rank's record is another object.

    They are nine in ten of all series, and a deployment that serves is scraped for weeks. Told by identity:
    comparing a thousand conversions would take as long.
    """

    def __init__(self) -> None:
        self._ranks: tuple[RankRecord, ...] = ()
        self._rest: object = None
        self._samples: list[Sample] = []

    def of(self, journal: Journal) -> list[Sample]:
        """What :func:`conversion_samples` gives for ``journal``."""
        rest = _what_else(journal)
        ranks = self._ranks
        same = len(ranks) == len(journal.ranks) and all(map(operator.is_, ranks, journal.ranks))
        if not same or rest != self._rest:
            self._samples = list(conversion_samples(journal))
            self._ranks, self._rest = journal.ranks, rest
        return self._samples


def _what_else(journal: Journal) -> object:
    """All but the ranks that the conversion's samples depend on; the heartbeat is not among it."""
    supervisor = journal.supervisor
    if supervisor is None:
        return None
    served = (supervisor.weights, supervisor.world_size, supervisor.ranks_report)
    return (*served, supervisor.checkpoint.moe_layers, distrusted_rank(journal))


class JournalCollector(Collector):
    """Reads the journal at every scrape; ``observe`` does so and must not raise."""

    def __init__(self, observe: Callable[[], Observation]) -> None:
        self._observe = observe
        self._conversion = ConversionMemo()

    def describe(self) -> Iterable[Family]:
        """The names, without reading anything."""
        return [_family(metric, []) for metric in METRICS]

    def collect(self) -> Iterable[Family]:
        """One family for every metric that has a value."""
        known: dict[Metric, list[Sample]] = {}
        seen = self._observe()
        for sample in itertools.chain(present_samples(seen), self._conversion.of(seen.journal)):
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
    if metric.kind == "stateset":
        states = StateSetMetricFamily(metric.name, metric.help)
        # One label, called like the metric: the family adds it itself.
        states.add_metric([], {sample.labels[0]: sample.value == 1 for sample in known})
        return states
    gauge = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for sample in known:
        gauge.add_metric(sample.labels, sample.value)
    return gauge
