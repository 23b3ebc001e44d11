# SPDX-License-Identifier: Apache-2.0
"""Reading ``catalogue.yaml``: known failures, each with a signature, its cause and the remedy."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from kimi_k3.words.phases import Phase

Line = Annotated[str, StringConstraints(strip_whitespace=True, min_length=10, pattern=r"^[^\n]+$")]


class Failure(BaseModel):
    """One row. ``pattern`` is searched in single log lines; ``source`` is where it was seen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$")]
    pattern: str
    phase: Phase | None
    cause: Line
    remedy: Line
    source: Annotated[str, Field(min_length=3)]

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        return pattern


class Catalogue(BaseModel):
    """All rows, the most specific first: the first row that matches any line wins."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1]
    failures: tuple[Failure, ...]

    @field_validator("failures")
    @classmethod
    def _unique(cls, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        names = [failure.name for failure in failures]
        if len(set(names)) < len(names):
            raise ValueError("a name is used twice")
        return failures


@cache
def load_catalogue() -> Catalogue:
    """The catalogue that travels inside the package."""
    text = (resources.files("kimi_k3.diagnosis") / "catalogue.yaml").read_text(encoding="utf-8")
    return Catalogue.model_validate(yaml.safe_load(text))
