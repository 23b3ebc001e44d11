# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kimi_k3.journal.reader import Fault
from kimi_k3.sidecar.collector import (
    OPEN_METRICS,
    PLAIN,
    ConversionMemo,
    SidecarRegistry,
    exposition,
    make_registry,
    negotiated,
)
from kimi_k3.sidecar.examples import MACHINE
from kimi_k3.sidecar.metrics import METRICS
from kimi_k3.sidecar.samples import Observation, conversion_samples

from .builders import NOW, health, journal, lossy, lossy_rank, supervisor

ACCEPTED = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


def parse_openmetrics(text: str) -> list[Family]:
    """The families of a scrape; raises when it is not OpenMetrics."""
    return list(openmetrics.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


def registry(**changes: str) -> SidecarRegistry:
    """The metrics of a lossy deployment."""
    seen = journal(supervisor(**changes)) if changes else lossy()
    observation = Observation(journal=seen, health=health(), machine=MACHINE, now=NOW)
    return make_registry(lambda: observation, proc=Path("/proc"))


def test_text_can_be_parsed() -> None:
    """Types and labels are as the table says, whatever the format."""
    body = exposition(registry(), PLAIN)
    families = {family.name: family for family in parse_text(body.decode())}
    for metric in METRICS:
        name = metric.name.removesuffix("_total")
        if name in families:
            assert families[name].documentation == metric.help
            assert {tuple(sorted(sample.labels)) for sample in families[name].samples} == {
                tuple(sorted(metric.labels))
            }
    assert "process_resident_memory_bytes" in families


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain;version=x", "text/html", ";,;", "\xff"])
def test_plain_text_for_everybody_else(accept: str) -> None:
    """Whatever a client accepts, it is not worth an error."""
    assert negotiated(accept) is PLAIN


@pytest.mark.parametrize(
    "accept", [ACCEPTED, "application/openmetrics-text; version=1.0.0-rc1", "Application/OpenMetrics-Text"]
)
def test_openmetrics_is_negotiated(accept: str) -> None:
    """Who asks for OpenMetrics gets it, in one version: for each that is written something is kept."""
    assert negotiated(accept) is OPEN_METRICS


def test_openmetrics_is_whole() -> None:
    """Up to the end mark."""
    body = exposition(registry(), OPEN_METRICS)
    assert body.endswith(b"# EOF\n")
    families = {family.name: family.type for family in parse_openmetrics(body.decode())}
    assert families["kimi_k3_deployment"] == "info"
    assert families["kimi_k3_phase"] == "stateset"
    assert families["kimi_k3_cgroup_memory_oom_kills"] == "counter"
    assert families["kimi_k3_ready"] == "gauge"


def test_awkward_label_values() -> None:
    """A name with quotes and line ends must not break the scrape."""
    odd = 'a"b\\c\nd{e}=,#'
    body = exposition(registry(profile=odd), OPEN_METRICS)
    [info] = [family for family in parse_openmetrics(body.decode()) if family.name == "kimi_k3_deployment"]
    assert info.samples[0].labels["profile"] == odd


def test_registering_reads_nothing() -> None:
    """The journal may not be there yet when the sidecar starts."""

    def never() -> Observation:
        raise AssertionError("read at registration")

    make_registry(never, proc=Path("/proc"))


def test_the_conversion_is_remembered_only_while_it_stays() -> None:
    """Most series are the conversion's: made anew when a rank reports, not at each heartbeat."""
    memo = ConversionMemo()
    first = lossy()
    samples = memo.of(first)
    assert samples == list(conversion_samples(first))
    assert first.supervisor is not None
    later = first.supervisor.model_copy(update={"updated_at": NOW})
    assert memo.of(replace(first, supervisor=later)) is samples
    for other in (
        replace(first, ranks=(first.ranks[0], lossy_rank(1, conversions=()))),
        replace(first, ranks=first.ranks[:1]),
        replace(first, ranks=(), faults=(Fault("rank-0000.json", "is empty"),)),
        journal(supervisor()),
        journal(None),
    ):
        assert memo.of(other) == list(conversion_samples(other))


def test_a_scrape_is_never_an_older_one() -> None:
    """What is kept as text follows the journal, in each format, and the end mark stands once."""
    seen = [lossy()]

    def observe() -> Observation:
        return Observation(journal=seen[0], health=health(), machine=MACHINE, now=NOW)

    one = make_registry(observe, proc=Path("/proc"))
    for _ in range(2):
        for form in (PLAIN, OPEN_METRICS):
            body = exposition(one, form)
            assert b'kimi_k3_conversion_groups{layer="2",projection="w2"} 20.0\n' in body
            assert body.count(b"# EOF") == (form is OPEN_METRICS)
            assert body.count(b"# TYPE kimi_k3_conversion_groups gauge") == 1
    seen[0] = replace(seen[0], ranks=seen[0].ranks[:1])
    for form in (PLAIN, OPEN_METRICS):
        assert b'kimi_k3_conversion_groups{layer="2",projection="w2"} 10.0\n' in exposition(one, form)
    seen[0] = journal(None)
    assert b"kimi_k3_conversion" not in exposition(one, PLAIN)
