# SPDX-License-Identifier: Apache-2.0
"""What a check finds: passed, or what is wrong and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.text import printable

SCHEMA_VERSION: Final = 1


class State(StrEnum):
    """How a check came out. ``unknown`` is what could not be found out: never a pass, never a refusal."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Finding(_Model):
    """The outcome of one check.

    Attributes:
        check: its name, for programs.
        state: how it came out.
        what: the evidence, on one line.
        remedy: what to do; ``None`` only for a pass.
        exit_code: of ``serve``, if this is what it refuses for.
    """

    check: str
    state: State
    what: str
    remedy: str | None = None
    exit_code: Annotated[ExitCode, Field(exclude=True)] = ExitCode.FAILED

    @field_validator("what", "remedy")
    @classmethod
    def _on_one_line(cls, text: str | None) -> str | None:
        # Names of files, mounts and variables come from outside: they must neither forge a line nor steer
        # a terminal.
        return None if text is None else printable(" ".join(text.split()))

    @model_validator(mode="after")
    def _says_what_to_do(self) -> Self:
        if (self.remedy is None) is not (self.state is State.PASS):
            raise ValueError("a remedy belongs to every finding but a pass")
        return self

    def __str__(self) -> str:
        """One line."""
        line = f"{self.state} {self.check}: {self.what}"
        return line if self.remedy is None else f"{line}; {self.remedy}"

    def refusal(self, others: int) -> OperatorError:
        """The error that this finding is; ``others`` is how many more failed."""
        more = f" (and {others} more {'check' if others == 1 else 'checks'} failed)" if others else ""
        return OperatorError(self.what + more, remedy=self.remedy or "", exit_code=self.exit_code)


class Report(_Model):
    """The document of ``kimi-k3 preflight --json``.

    Attributes:
        schema_version: of this document.
        version: of the program.
        profile: its name.
        checkpoint: the directory; ``None`` if none was given.
        state: the worst of all findings, ``unknown`` counting as ``warn``.
        seconds: the checks took.
        findings: in the order of the checks.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    version: str
    profile: str
    checkpoint: str | None
    state: State
    seconds: Annotated[float, Field(ge=0)]
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0, 1 or 2: nothing is wrong, something may be, something is."""
        return {State.PASS: 0, State.WARN: 1, State.FAIL: 2}[self.state]


def overall(findings: Iterable[Finding]) -> State:
    """The worst state, ``unknown`` counting as ``warn``."""
    states = {finding.state for finding in findings}
    if State.FAIL in states:
        return State.FAIL
    return State.WARN if states & {State.WARN, State.UNKNOWN} else State.PASS


def passed(check: str, what: str) -> Finding:
    """Nothing wrong; ``what`` is what was seen."""
    return Finding(check=check, state=State.PASS, what=what)


def warned(check: str, what: str, remedy: str) -> Finding:
    """A start may work, or be slow."""
    return Finding(check=check, state=State.WARN, what=what, remedy=remedy)


def failed(check: str, what: str, remedy: str, exit_code: ExitCode = ExitCode.FAILED) -> Finding:
    """A start would fail, or serve something else than was asked for."""
    return Finding(check=check, state=State.FAIL, what=what, remedy=remedy, exit_code=exit_code)


def unknown(check: str, what: str, remedy: str) -> Finding:
    """It could not be found out; ``what`` says why."""
    return Finding(check=check, state=State.UNKNOWN, what=what, remedy=remedy)


def of_error(check: str, error: OperatorError) -> Finding:
    """The finding that an error is."""
    return failed(check, error.what, error.remedy, error.exit_code)
