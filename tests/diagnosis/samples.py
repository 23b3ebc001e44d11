# SPDX-License-Identifier: Apache-2.0
"""The lines in ``samples.yaml``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

SURVEY = range(1, 72)
"""Numbers of the survey of failures that the catalogue must cover."""


class Sample(BaseModel):
    """Lines of one failing engine and the row that explains them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    row: str
    lines: tuple[str, ...]
    number: int | None = None
    exit_code: int | None = None


@cache
def load_samples() -> tuple[Sample, ...]:
    text = Path(__file__).with_name("samples.yaml").read_text(encoding="utf-8")
    return tuple(Sample.model_validate(sample) for sample in yaml.safe_load(text))
