# SPDX-License-Identifier: Apache-2.0
"""The rendered cases as files, so that a change of the chart is seen: ``python -m tests.helm.golden``."""

from __future__ import annotations

from pathlib import Path

from tests.helm.cases import CASES, GATEWAYS
from tests.helm.rendering import MONITORING, template

DIRECTORY = Path(__file__).parent / "golden"
KEPT = (
    *("cpu-tiny", "ep8", "pp2-tp8", "two-nodes", "two-replicas", "openshift", "tls", "route", "verified"),
    *("kernel", "everything"),
)
"""Those that differ in more than a name or a number."""

FILES_OF_THE_CHART = "monitoring.dashboards.enabled=false,monitoring.rules.enabled=false"
"""Are files already."""


def golden(case: str) -> str:
    """What a case is rendered to."""
    text = template(CASES[case], apis=(*MONITORING, *GATEWAYS), further=("--set", FILES_OF_THE_CHART))
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for path in DIRECTORY.glob("*.yaml"):
        path.unlink()
    for name in KEPT:
        (DIRECTORY / f"{name}.yaml").write_text(golden(name))
