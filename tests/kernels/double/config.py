# SPDX-License-Identifier: Apache-2.0
"""In the place of aiter/jit/core.py: which tuned table the runtime reads, and how strictly.

With AITER_CONFIG_FMOE it is that file; without, all that are shipped are merged as soon as the module is
imported. Like pandas, it refuses a file with rows that are longer than its header.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

CONFIGS = Path(__file__).parent.parent / "configs"


class ParserError(ValueError):
    """pandas' own."""


def read_strictly(path: str | Path) -> list[dict[str, str]]:
    """A table as pandas reads it."""
    with Path(path).open(newline="") as file:
        header, *lines = [line for line in csv.reader(file) if line]
    for number, line in enumerate(lines, 2):
        if len(line) > len(header):
            raise ParserError(
                f"Error tokenizing data. C error: Expected {len(header)} fields in line {number}, "
                f"saw {len(line)}"
            )
    return [dict(zip(header, line, strict=False)) for line in lines]


def tuned_file() -> str:
    """The file that rows are looked up in."""
    if given := os.environ.get("AITER_CONFIG_FMOE"):
        return given
    for path in sorted((CONFIGS / "model_configs").glob("*tuned_fmoe*.csv")):
        read_strictly(path)
    return str(CONFIGS / "tuned_fmoe.csv")
