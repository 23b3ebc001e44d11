# SPDX-License-Identifier: Apache-2.0
"""Every PromQL expression of the project, and where it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.observability.known import Known
from tests.observability.lint import recorded

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "kimi-k3-gfx942"
DASHBOARDS = CHART / "files" / "dashboards"
RULES = CHART / "files" / "rules"

VALUES = {
    "__rate_interval": "1m",
    "__interval": "15s",
    "__range": "1h",
    "namespace": ".*",
    "release": ".*",
    "model_name": ".*",
    "engine": ".*",
    "hostname": ".*",
    "prefix": "",
}
"""What Grafana puts in for variables when nothing is chosen: ``.*`` is our value of All."""

_VARIABLE = re.compile(r"\$(?:\{([a-z_]\w*)(?::\w+)?\}|([a-z_]\w*))")
_SHOWN = re.compile(r"\{\{\s*(?:\$labels\.)?(?!end\b)(\w+)\s*\}\}|\$labels\.(\w+)")


@dataclass(frozen=True)
class Expression:
    """``shown`` are labels that a legend or an annotation shows of the result."""

    where: str
    text: str
    shown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """One rule of a file; ``record`` is the metric's name that it makes, empty for an alert."""

    expression: Expression
    record: str


def substituted(text: str, values: dict[str, str] = VALUES) -> str:
    """A query as Grafana sends it.

    Raises:
        KeyError: it names a variable that has no value.
    """
    return _VARIABLE.sub(lambda found: values[found[1] or found[2]], text)


def shown_labels(text: str) -> tuple[str, ...]:
    """Labels in a legend or in an annotation's template."""
    return tuple(found[1] or found[2] for found in _SHOWN.finditer(text) if found[1] != "$value")


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels that show something, also those in rows."""
    found: list[dict[str, Any]] = []
    for panel in dashboard["panels"]:
        found += panel.get("panels", []) if panel["type"] == "row" else [panel]
    return found


def of_dashboards(directory: Path = DASHBOARDS) -> Iterator[Expression]:
    """Queries of panels, with what their legends show."""
    for path in sorted(directory.glob("*.json")):
        for panel in panels(json.loads(path.read_text())):
            for target in panel.get("targets", []):
                yield Expression(
                    f"{path.name}: {panel['title']}",
                    substituted(target["expr"]),
                    shown_labels(target.get("legendFormat", "")),
                )


def rules(directory: Path = RULES) -> Iterator[Rule]:
    """Every rule of the chart's files."""
    for path in sorted(directory.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                texts = " ".join([*rule.get("annotations", {}).values(), *rule.get("labels", {}).values()])
                name = rule.get("record", "")
                where = f"{path.name}: {name or rule['alert']}"
                # As the chart renders it: absent() then has the labels of what is absent.
                text = rule["expr"].replace('release=~".+"', 'namespace="models", release="k3"')
                yield Rule(Expression(where, text, shown_labels(texts)), name)


def of_documents() -> Iterator[Expression]:
    """Each expression in blocks of PromQL in README.md, the chart's and docs/: empty lines part them."""
    for path in [ROOT / "README.md", CHART / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in re.findall(r"^```promql\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            for number, text in enumerate(re.split(r"\n\s*\n", block.strip())):
                yield Expression(f"{path.name}: block of PromQL, {number + 1}", text)


def of_autoscalers() -> Iterator[Expression]:
    """Queries of KEDA's and the Prometheus adapter's examples in YAML: ``query:`` and ``metricsQuery:``."""
    for path in [*sorted((ROOT / "docs").glob("*.md")), *sorted(CHART.rglob("*.yaml"))]:
        for text in re.findall(r"^\s*(?:query|metricsQuery): *(.+)$", path.read_text(), re.MULTILINE):
            yield Expression(f"{path.name}: query", yaml.safe_load(text))


def with_recorded(known: Known, directory: Path = RULES) -> Known:
    """What is known, and what the chart's recording rules add, in the order of the files."""
    for rule in rules(directory):
        if rule.record:
            known = known.with_families([recorded(rule.record, rule.expression.text, known)])
    return known
