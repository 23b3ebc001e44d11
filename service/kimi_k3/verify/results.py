# SPDX-License-Identifier: Apache-2.0
"""What a verification found, as it is kept: a file of JSON for each kind; the report is made from them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from kimi_k3.words.weights import ScaleRule, Weights

SCHEMA_VERSION: Final = 1


class Kept(BaseModel):
    """Base of everything that is written: no unknown keys; ``null`` is what nobody measured."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Kind(StrEnum):
    """A verification, by the name of its command."""

    SMOKE = "smoke"
    KERNEL = "kernel"
    ACCURACY = "accuracy"
    GSM8K = "gsm8k"
    BENCH = "bench"
    LONG = "long"


class State(StrEnum):
    """Whether something is as it should be."""

    PASS = "pass"
    FAIL = "fail"
    NOT_RUN = "not run"


class Row(Kept):
    """One thing that was to be shown.

    Attributes:
        name: what, in a few words.
        evidence: what was found, or why it was not run; one line.
    """

    name: str
    state: State
    evidence: str

    @property
    def line(self) -> str:
        """As it is printed."""
        return f"{self.state:<8}{self.name}: {self.evidence}"


class Figure(Kept):
    """A measured number.

    Attributes:
        unit: ``""`` for a share or a count.
        standard_error, low, high: how sure it is, the latter two a 95 % interval.
        count: of what it is the mean or the share.
        published: what others published for it, with ``source``.
    """

    name: str
    value: float
    unit: str = ""
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None
    count: int | None = None
    published: float | None = None
    source: str | None = None


class Curve(Kept):
    """Points of a plot; curves of the same ``plot`` share its axes.

    Attributes:
        x, y: as many of each.
        error: half the length of each point's bar, where it has one.
    """

    plot: str
    name: str
    x_label: str
    y_label: str
    logarithmic: bool = False
    x: tuple[float, ...]
    y: tuple[float, ...]
    error: tuple[float, ...] | None = None


class Subject(Kept):
    """What was asked, by its sidecar's word; without a sidecar only ``engine`` and ``model`` are known.

    Attributes:
        versions: of what computes, by distribution.
        hardware: in words.
    """

    engine: str
    model: str | None = None
    checkpoint: str | None = None
    profile: str | None = None
    weights: Weights | None = None
    rule: ScaleRule | None = None
    ranks: int | None = None
    hardware: str | None = None
    versions: dict[str, str] = {}

    @property
    def served_as(self) -> str:
        """The weights in a few words."""
        if self.weights is None:
            return "unknown weights"
        return f"{self.weights} ({self.rule})" if self.rule is not None else self.weights.value


Setting = str | int | float | bool | None


class Result(Kept):
    """A verification of one kind.

    Attributes:
        settings: with which it was made; the same ones make it again.
        ended: ``None`` while it runs, or if nobody could say that it ended.
        broken_off: why it did not come to its end; what was measured until then is here.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Kind
    subject: Subject
    settings: Annotated[dict[str, Setting], Field(max_length=64)]
    began: AwareDatetime
    ended: AwareDatetime | None = None
    broken_off: str | None = None
    rows: tuple[Row, ...] = ()
    figures: tuple[Figure, ...] = ()
    curves: tuple[Curve, ...] = ()

    @property
    def state(self) -> State:
        """Fail if anything does or if it was broken off, pass if something did, else not run."""
        states = {row.state for row in self.rows}
        if self.broken_off is not None or State.FAIL in states:
            return State.FAIL
        return State.PASS if State.PASS in states else State.NOT_RUN

    def with_end(self, moment: datetime) -> Result:
        """The same, ended."""
        return self.model_copy(update={"ended": moment})
