# SPDX-License-Identifier: Apache-2.0
"""The chart's rules: read, rendered for a release, and made faster for tests that cause what they mean."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.observability.expressions import RULES

FILE = RULES / "kimi-k3.yaml"
GPU_FILE = RULES / "gpus" / "gpus.yaml"

SELECTED = 'release=~".+"'
"""What the chart replaces by the release's own labels."""

GPUS = 'gpu_id=~".+"'
"""The same of the exporter's metrics."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_RANGE = re.compile(r"\[(\d+[smhd])\]")

Group = dict[str, Any]


def groups(*files: Path) -> list[Group]:
    """The groups of rules in files, as they lie there."""
    return [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]


def rules_of(found: list[Group]) -> Iterator[dict[str, Any]]:
    """Every rule of these groups."""
    for group in found:
        yield from group["rules"]


def alerts(*files: Path) -> list[str]:
    """The names of the alerts in files, in their order."""
    return [rule["alert"] for rule in rules_of(groups(*files)) if "alert" in rule]


def pod_of(release: str) -> str:
    """What Kubernetes calls a pod of the Deployment that the chart makes for a release."""
    return f"{release}-kimi-k3-gfx942-7d9f8b6c5-x2x4z"


def of_release(text: str, namespace: str, release: str) -> str:
    """What the chart makes of a file with rules; a test holds it to that."""
    own = f'namespace="{namespace}", release="{release}"'
    signs = "[bcdfghjklmnpqrstvwxz2456789]"
    pods = f'namespace="{namespace}", pod=~"{release}-kimi-k3-gfx942-{signs}{{1,10}}-{signs}{{5}}"'
    return text.replace(SELECTED, own).replace(GPUS, pods)


def scaled(found: list[Group], factor: int) -> list[Group]:
    """The same rules with time ``factor`` times faster: ``for``, ``interval`` and the ranges of expressions.

    A range must stay a whole number of milliseconds. Thresholds in seconds, as the objective's, stay.
    """
    made = copy.deepcopy(found)
    for group in made:
        if "interval" in group:
            group["interval"] = _faster(group["interval"], factor)
        for rule in group["rules"]:
            rule["expr"] = _RANGE.sub(lambda one: f"[{_faster(one[1], factor)}]", rule["expr"])
            if "for" in rule:
                rule["for"] = _faster(rule["for"], factor)
    return made


def _faster(duration: str, factor: int) -> str:
    number, unit = int(duration[:-1]), duration[-1]
    return f"{number * _SECONDS[unit] * 1000 // factor}ms"
