# SPDX-License-Identifier: Apache-2.0
"""Reading ``catalogue.yaml``: known failures, each with a signature, its cause and the remedy."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from kimi_k3.diagnosis.pattern import anchors
from kimi_k3.errors import nearest
from kimi_k3.words.phases import Phase

Line = Annotated[str, StringConstraints(strip_whitespace=True, min_length=10, pattern=r"^[^\n]+$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$")]
ExitCodes = tuple[Annotated[int, Field(ge=-64, le=255)], ...]


class Level(StrEnum):
    """How much a row explains, the best first; a better one is preferred wherever its line stands."""

    ROOT = "root"
    GENERAL = "general"
    DEATH = "death"
    EFFECT = "effect"
    WRAPPER = "wrapper"
    NOTICE = "notice"
    SYMPTOM = "symptom"

    @property
    def position(self) -> int:
        """Index in the order of preference."""
        return list(Level).index(self)

    @property
    def fatal(self) -> bool:
        """Whether its rows can be why the engine ended."""
        return self.position <= Level.EFFECT.position

    @property
    def description(self) -> str:
        """What rows of this level have in common."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    Level.ROOT: "the cause itself",
    Level.GENERAL: "an error that several causes can have",
    Level.DEATH: "how a process ended",
    Level.EFFECT: "what the others do when a process stalls or is gone",
    Level.WRAPPER: "a line that only says that something else failed",
    Level.NOTICE: "slow, or not as asked; nothing ends because of it",
    Level.SYMPTOM: "no log shows it, so it is never claimed from one",
}


class Grade(StrEnum):
    """How well a signature is known."""

    REPRODUCED = "reproduced"
    READ = "read"
    PARAPHRASED = "paraphrased"
    GENERIC = "generic"

    @property
    def description(self) -> str:
        """The same in a few words."""
        return _GRADES[self]


_GRADES = {
    Grade.REPRODUCED: "seen while this product was built",
    Grade.READ: "exact text read in code or in a thread",
    Grade.PARAPHRASED: "the real wording may differ",
    Grade.GENERIC: "of ROCm or containers, not of this model",
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: object) -> object:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    raise ValueError(f"there is no key {key!r}; {nearest(str(key), cls.model_fields)}")
        return data


def _checked(pattern: str | None) -> str | None:
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        anchors(pattern)
    return pattern


class Mark(_Strict):
    """Something to be seen beside a failure: a line, or the exit code."""

    pattern: str | None = None
    exit_codes: ExitCodes = ()

    _compiles = field_validator("pattern")(_checked)


class Failure(_Strict):
    """One row; the head of ``catalogue.yaml`` tells what its keys mean."""

    name: Name
    covers: tuple[Annotated[int, Field(ge=1)], ...] = ()
    level: Level
    pattern: str | None = None
    when: tuple[Name, ...] = ()
    unless: tuple[Name, ...] = ()
    until: Name | None = None
    exit_codes: ExitCodes = ()
    silent: bool = False
    warned: bool = False
    phase: Phase | None
    cause: Line
    remedy: Line
    source: Annotated[str, Field(min_length=3)]
    grade: Grade

    _compiles = field_validator("pattern")(_checked)

    @model_validator(mode="after")
    def _recognisable(self) -> Self:
        signed = bool(self.pattern or self.when or self.exit_codes)
        if signed is (self.level is Level.SYMPTOM):
            raise ValueError("a symptom has no signature, and every other row has one")
        return self

    @property
    def conditional(self) -> bool:
        """Whether more than one line must fit, which makes it more specific."""
        return bool(self.when or self.unless)


class Catalogue(_Strict):
    """All rows; of two that match the same line equally well, the first is preferred."""

    schema_version: Literal[2]
    marks: dict[Name, Mark] = {}
    failures: tuple[Failure, ...]

    @field_validator("failures")
    @classmethod
    def _unique(cls, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        names = [failure.name for failure in failures]
        if len(set(names)) < len(names):
            raise ValueError("a name is used twice")
        return failures

    @model_validator(mode="after")
    def _marks_exist(self) -> Self:
        for failure in self.failures:
            used = (*failure.when, *failure.unless, *((failure.until,) if failure.until else ()))
            for name in used:
                if name not in self.marks:
                    raise ValueError(
                        f"{failure.name}: there is no mark {name!r}; {nearest(name, self.marks)}"
                    )
        return self

    @property
    def symptoms(self) -> tuple[Failure, ...]:
        """Rows that no log shows."""
        return tuple(row for row in self.failures if row.level is Level.SYMPTOM)


@cache
def load_catalogue() -> Catalogue:
    """The catalogue that travels inside the package."""
    text = (resources.files("kimi_k3.diagnosis") / "catalogue.yaml").read_text(encoding="utf-8")
    return Catalogue.model_validate(yaml.safe_load(text))
