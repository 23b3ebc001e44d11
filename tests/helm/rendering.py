# SPDX-License-Identifier: Apache-2.0
"""What the chart makes of values, by Helm itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.helm.programs import HELM_4, Release, helm
from tests.surroundings import SURROUNDINGS

CHART = Path(__file__).parents[2] / "helm" / "kimi-k3-gfx942"
MONITORING = tuple(
    f"monitoring.coreos.com/v1/{kind}" for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule")
)
"""Kinds of Prometheus' operator, as a cluster that has it tells them."""

GROUPS = "leaderworkerset.x-k8s.io/v1"
"""What makes groups of pods for a deployment over several nodes."""

MINORS = ("1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
"""Kubernetes' minor versions that the chart is for."""

Values = Mapping[str, Any]
Object = dict[str, Any]


class Refused(Exception):
    """Helm ended with an error; the text is what it printed."""


def ran(
    *arguments: str | Path,
    release: Release = HELM_4,
    given: Mapping[str, str] | None = None,
    text: str | None = None,
) -> str:
    """What ``helm ARGUMENTS...`` prints.

    Raises:
        Refused: it ended with an error.
    """
    done = subprocess.run(
        [helm(release), *arguments],
        env={**SURROUNDINGS, **(given or {})},
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        raise Refused(done.stderr + done.stdout)
    return done.stdout


def template(
    values: Values,
    *,
    chart: Path = CHART,
    apis: Sequence[str] = (*MONITORING, GROUPS),
    minor: str = "1.35",
    name: str = "k3",
    release: Release = HELM_4,
    further: Sequence[str | Path] = (),
) -> str:
    """``helm template``: all objects as text; ``name`` is the release's.

    Raises:
        Refused: the chart does not take the values.
    """
    api_versions = [part for api in apis for part in ("--api-versions", api)]
    return ran(
        *("template", name, chart, "--namespace", "models", "--kube-version", f"{minor}.0"),
        *(*api_versions, "--values", "-", *further),
        release=release,
        # As JSON, which is YAML by any version of it: 1e3 and 0x10 in quotes are texts.
        text=json.dumps(dict(values)),
    )


def objects(text: str) -> list[Object]:
    """The objects in a text of several documents."""
    return [one for one in yaml.safe_load_all(text) if one]


def rendered(values: Values, **options: Any) -> list[Object]:
    """``helm template``: all objects."""
    return objects(template(values, **options))


def one(found: Sequence[Object], kind: str, suffix: str = "") -> Object:
    """The object of a kind, or that whose name ends so."""
    (chosen,) = [each for each in found if each["kind"] == kind and each["metadata"]["name"].endswith(suffix)]
    return chosen


def engine_pod(found: Sequence[Object]) -> Object:
    """The template of the pod that serves the API."""
    (pod,) = [template for name, template in pod_templates(found) if name in ("template", "leaderTemplate")]
    return pod


def pod_templates(found: Sequence[Object]) -> list[tuple[str, Object]]:
    """The templates of the engine's pods, by what they are called in their object."""
    for each in found:
        if each["kind"] == "Deployment":
            return [("template", each["spec"]["template"])]
        if each["kind"] == "LeaderWorkerSet":
            group = each["spec"]["leaderWorkerTemplate"]
            return [(name, group[name]) for name in ("leaderTemplate", "workerTemplate")]
    raise AssertionError("nothing makes pods")


def containers(found: Sequence[Object]) -> dict[str, Object]:
    """The containers of the engine's pod by their names, those that come first included."""
    spec = engine_pod(found)["spec"]
    return {each["name"]: each for each in (*spec["initContainers"], *spec["containers"])}


def merged(base: Values, change: Values) -> dict[str, Any]:
    """``base`` with ``change`` in it, as Helm lays values over each other."""
    made = dict(base)
    for key, value in change.items():
        known = made.get(key)
        made[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return made
