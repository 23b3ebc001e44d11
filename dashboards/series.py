# SPDX-License-Identifier: Apache-2.0
"""Selectors of series, with the dashboards' variables as matchers."""

from __future__ import annotations

from kimi_k3.sidecar import metrics as m
from kimi_k3.words.phases import Phase

RELEASE = "namespace, release"
"""Labels of one deployment: Prometheus sets them on every series of ours and of vLLM's."""

MODEL = "namespace, release, model_name, engine"
"""Labels of one of vLLM's engines."""

RATE = "$__rate_interval"
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
    return _series(f"${{prefix}}{name}", "hostname", matchers)


def quantile(share: float, histogram: str, by: str = MODEL) -> str:
    """A quantile of one of vLLM's histograms; nothing, not NaN, where nothing was observed."""
    buckets = f"rate({vllm(f'{histogram}_bucket')}[{RATE}])"
    return f"histogram_quantile({share:g}, sum by (le, {by}) ({buckets})) >= 0"


def rate(counter: str, by: str = MODEL) -> str:
    """Of one of vLLM's counters, in a second."""
    return f"sum by ({by}) (rate({vllm(f'{counter}_total')}[{RATE}]))"


def phase_number() -> str:
    """The present phase as its position, by release and instance: a state timeline shows numbers as words."""
    terms = [
        f"{phase.position} * {ours(m.PHASE, f'''kimi_k3_phase="{phase}"''')}"
        for phase in Phase
        if phase.position
    ]
    first = ours(m.PHASE, f'kimi_k3_phase="{list(Phase)[0]}"')
    return f"sum by ({RELEASE}, instance) (0 * {first} or {' or '.join(terms)})"


def _series(name: str, variables: str, matchers: tuple[str, ...]) -> str:
    chosen = [f'{variable}=~"${variable}"' for variable in variables.split()]
    return f"{name}{{{', '.join([*chosen, *matchers])}}}"
