# SPDX-License-Identifier: Apache-2.0
"""From samples to what Prometheus reads."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    StateSetMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from kimi_k3.journal.models import RankRecord
from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.metrics import METRICS, Metric
from kimi_k3.sidecar.samples import Observation, Sample, conversion_samples, distrusted_rank, present_samples


@dataclass(frozen=True)
class Format:
    """How a scrape is written: in one of few ways, for each is kept."""

    name: str
    encode: Callable[[CollectorRegistry], bytes]
    content_type: str


PLAIN = Format("metrics", generate_latest, CONTENT_TYPE_PLAIN_0_0_4)
OPEN_METRICS = Format("openmetrics", openmetrics.generate_latest, openmetrics.CONTENT_TYPE_LATEST)


def negotiated(accept: str) -> Format:
    """OpenMetrics for who accepts it, by whatever version, else plain text."""
    kinds = [one.partition(";")[0].strip().lower() for one in accept.split(",")]
    return OPEN_METRICS if "application/openmetrics-text" in kinds else PLAIN


END_MARK = b"# EOF\n"
"""What ends a scrape as OpenMetrics, once."""


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
    served = (supervisor.weights, supervisor.requantisation, supervisor.world_size, supervisor.node)
    layers = (supervisor.checkpoint.moe_layers, supervisor.stages)
    return (*served, supervisor.ranks_report, *layers, distrusted_rank(journal))


class JournalCollector(Collector):
    """Reads the journal at every scrape; ``observe`` does so and must not raise.

    It gives all but what the conversion did, which :class:`ConversionText` keeps as text.
    """

    def __init__(self, observe: Callable[[], Observation]) -> None:
        self._observe = observe
        self.seen: Journal | None = None

    def describe(self) -> Iterable[Family]:
        """The names, without reading anything."""
        return [_family(metric, []) for metric in METRICS]

    def collect(self) -> Iterable[Family]:
        """One family for every metric that has a value."""
        observation = self._observe()
        self.seen = observation.journal
        return _families(present_samples(observation))


class ConversionText:
    """The conversion's part of a scrape, written anew for each format only when there is something new.

    Writing it takes most of a scrape's time, during which no other thread of the sidecar gets far.
    """

    def __init__(self) -> None:
        self._memo = ConversionMemo()
        self._written: tuple[list[Sample], dict[str, bytes]] = ([], {})

    def of(self, journal: Journal, form: Format) -> bytes:
        """The text in a format, without an end mark."""
        samples = self._memo.of(journal)
        written, texts = self._written
        if written is not samples:
            texts = {}
            self._written = (samples, texts)
        if form.name not in texts:
            families = CollectorRegistry(auto_describe=False)
            families.register(_Given(_families(samples)))
            texts[form.name] = form.encode(families).removesuffix(END_MARK)
        return texts[form.name]


class _Given(Collector):
    """Families that are there already."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def describe(self) -> Iterable[Family]:
        """Nothing: no other collector stands beside it."""
        return []

    def collect(self) -> Iterable[Family]:
        """The families."""
        return self._families


class SidecarRegistry(CollectorRegistry):
    """A registry of the sidecar's metrics and those of its own process; :func:`exposition` writes it."""

    def __init__(self, observe: Callable[[], Observation], proc: Path) -> None:
        super().__init__(auto_describe=False)
        self.journal = JournalCollector(observe)
        self.conversion = ConversionText()
        self.register(self.journal)
        ProcessCollector(proc=str(proc), registry=self)


def make_registry(observe: Callable[[], Observation], *, proc: Path) -> SidecarRegistry:
    """A registry with the sidecar's metrics and those of its own process."""
    return SidecarRegistry(observe, proc)


def exposition(registry: SidecarRegistry, form: Format) -> bytes:
    """The scrape's body."""
    body = form.encode(registry)
    if registry.journal.seen is not None:
        body = registry.conversion.of(registry.journal.seen, form) + body
    return body


def _families(samples: Iterable[Sample]) -> list[Family]:
    known: dict[Metric, list[Sample]] = {}
    for sample in samples:
        known.setdefault(sample.metric, []).append(sample)
    return [_family(metric, known[metric]) for metric in METRICS if metric in known]


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
