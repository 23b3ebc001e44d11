# SPDX-License-Identifier: Apache-2.0
"""What others published of this model, as data: ``published.yaml``."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from kimi_k3.words.weights import Weights

FILE = "published.yaml"

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$")]
Line = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, pattern=r"^[^\n]+$")]


class Published(BaseModel):
    """A number that somebody else measured.

    Attributes:
        what: was measured, in a few words.
        unit: ``""`` for a share or a count.
        standard_error: as published; ``None`` where it was not.
        count: of how many questions or requests.
        hardware, software, weights: ``None`` where the source does not say.
        source: who, where and when.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    what: Line
    value: float
    unit: str = ""
    standard_error: Annotated[float, Field(ge=0)] | None = None
    count: Annotated[int, Field(ge=1)] | None = None
    hardware: Line | None = None
    software: Line | None = None
    weights: Weights | None = None
    source: Line


@cache
def published() -> dict[str, Published]:
    """Every published number by its name in ``published.yaml``."""
    text = (resources.files("kimi_k3.verify") / FILE).read_bytes()
    return TypeAdapter(dict[Name, Published]).validate_python(yaml.safe_load(text))
