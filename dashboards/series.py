# SPDX-License-Identifier: Apache-2.0
"""Selectors of series, with the dashboards' variables as matchers."""

from __future__ import annotations

from collections.abc import Iterable

from kimi_k3.sidecar import metrics as m
from kimi_k3.words.phases import Phase

RELEASE = "namespace, release"
"""Labels of one deployment: Prometheus sets them on every series of ours and of vLLM's."""

ENGINE = "namespace, release, instance"
"""Labels of one sidecar: of one engine, or of one node of it."""

MODEL = "namespace, release, model_name, engine"
"""Labels of one of vLLM's engines."""

PREFIX = "${prefix}"
RATE = "$__rate_interval"
TENS, ONES = "tens", "ones"
"""Labels that :func:`split` makes."""

QUANTILES = (0.5, 0.95, 0.99)


def ours(metric: m.Metric, *matchers: str) -> str:
    """Series of the sidecar."""
    return _series(metric.name, "namespace release", matchers)


def server(name: str, *matchers: str) -> str:
    """Series of vLLM's HTTP server, which know nothing of models."""
    return _series(name, "namespace release", matchers)


def vllm(name: str, *matchers: str) -> str:
    """Series of vLLM by their name without ``vllm:``."""
    return _series(f"vllm:{name}", "namespace release model_name engine", matchers)


def gpu(name: str, *matchers: str) -> str:
    """Series of AMD's device-metrics-exporter, which may put a prefix before its names."""
    return _series(PREFIX + name, "hostname", matchers)


def most(by: str, series: str) -> str:
    """The greatest for each of the labels ``by``."""
    return f"max by ({by}) ({series})"


def least(by: str, series: str) -> str:
    """The smallest for each of the labels ``by``."""
    return f"min by ({by}) ({series})"


def total(by: str, series: str) -> str:
    """The sum for each of the labels ``by``."""
    return f"sum by ({by}) ({series})"


def equal(label: str, value: str) -> str:
    """A matcher."""
    return f'{label}="{value}"'


def any_of(label: str, values: Iterable[str]) -> str:
    """A matcher of several values."""
    return f'{label}=~"{"|".join(values)}"'


def quantile(share: float, buckets: str, by: str) -> str:
    """A quantile of a histogram; nothing, not NaN, where nothing was observed."""
    return f"histogram_quantile({share:g}, {total(f'le, {by}', f'rate({buckets}[{RATE}])')}) >= 0"


def rate(by: str, counter: str) -> str:
    """Of a counter, in a second."""
    return total(by, f"rate({counter}[{RATE}])")


def part(numerator: str, denominator: str) -> str:
    """One of the other; nothing, not NaN, where the other is 0."""
    return f"{numerator} / {denominator} >= 0"


def first_nodes(series: str) -> str:
    """Of engines: of several nodes the first one's sidecar tells of the engine, others of their machines."""
    others = ours(m.INFO, 'node!="0"')
    return f"{series} unless on ({ENGINE}) {others}"


def split(label: str, series: str) -> str:
    """A label that is a number as two: :data:`TENS` is 40 for 47, and :data:`ONES` is 7."""
    tens = f'label_replace({series}, "{TENS}", "${{1}}0", "{label}", "(.*).")'
    return f'label_replace({tens}, "{ONES}", "$1", "{label}", ".*(.)")'


def phase_number() -> str:
    """The present phase as its position, by release and instance: a state timeline shows numbers as words."""
    of_phase = {phase: ours(m.PHASE, equal("kimi_k3_phase", phase)) for phase in Phase}
    terms = " or ".join(f"{phase.position} * {series}" for phase, series in of_phase.items())
    return total(ENGINE, terms)


def _series(name: str, variables: str, matchers: tuple[str, ...]) -> str:
    chosen = [f'{variable}=~"${variable}"' for variable in variables.split()]
    return f"{name}{{{', '.join([*chosen, *matchers])}}}"
