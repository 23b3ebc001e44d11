# SPDX-License-Identifier: Apache-2.0
"""``python -m dashboards`` writes the JSON that Grafana reads into the chart's ``files/``."""

from __future__ import annotations

from pathlib import Path

from dashboards import fleet, node, serving, start
from dashboards.parts import as_json

DIRECTORY = Path(__file__).parents[1] / "helm" / "kimi-k3-gfx942" / "files" / "dashboards"


def texts() -> dict[str, str]:
    """The content of each file by its name."""
    made = {"start": start, "serving": serving, "node": node, "fleet": fleet}
    return {f"{name}.json": as_json(module.dashboard()) for name, module in made.items()}


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for name, text in texts().items():
        (DIRECTORY / name).write_text(text, encoding="utf-8")
