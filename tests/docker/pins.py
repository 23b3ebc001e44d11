# SPDX-License-Identifier: Apache-2.0
"""docker/versions.env, as data."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def variables(path: Path) -> dict[str, str]:
    """The variables that a file sets."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


PINS = variables(ROOT / "docker" / "versions.env")
