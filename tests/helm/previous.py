# SPDX-License-Identifier: Apache-2.0
"""The chart as it was once, kept beside the tests; ``python -m tests.helm.previous COMMIT`` keeps another.

A release that somebody has must become one of today's chart, and a checkout need not have its history.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.helm.rendering import CHART

FILE = Path(__file__).with_name("previous.tgz")


def unpacked(directory: Path) -> Path:
    """The chart, in a directory below this one."""
    subprocess.run(["tar", "--extract", "--file", FILE, "--directory", directory], check=True)
    return directory / CHART.name


if __name__ == "__main__":
    tree = f"{sys.argv[1]}:helm"
    root = CHART.parents[1]
    subprocess.run(["git", "archive", "--output", FILE, tree, CHART.name], cwd=root, check=True)
