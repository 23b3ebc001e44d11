# SPDX-License-Identifier: Apache-2.0
"""The doctor's answer, for programs and for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict

from kimi_k3.diagnosis.catalogue import load_catalogue
from kimi_k3.diagnosis.match import Diagnosis, Finding
from kimi_k3.doctor.sources import Log, State
from kimi_k3.errors import ExitCode
from kimi_k3.journal.models import Explanation, FailureRecord, SupervisorRecord
from kimi_k3.sidecar.arithmetic import is_fresh
from kimi_k3.words.phases import Phase


class Outcome(StrEnum):
    """What can be said of an engine."""

    FAILED = "failed"
    """And a cause was found."""

    NOT_STARTED = "not started"
    """The supervisor ended before it started vLLM, and recorded why."""

    ENDED = "ended"
    """On request, or by its own exit code well."""

    RUNNING = "running"
    """And nothing is known to be wrong."""

    UNKNOWN = "unknown"

    @property
    def exit_code(self) -> ExitCode:
        """Of the command."""
        return ExitCode.FAILED if self is Outcome.UNKNOWN else ExitCode.OK


class Symptom(BaseModel):
    """A failure that no log shows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    cause: str
    remedy: str


class Report(BaseModel):
    """The answer; the JSON of ``--json``.

    ``found`` says that a cause was found; ``why`` is the answer where there is none. ``reported`` is what the
    engine's processes said of themselves, which comes before the log; ``recorded`` is what the supervisor
    made of the engine's death; ``sources`` says which of two said what. ``symptoms`` are there when nothing
    is known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    state: str | None
    log: str | None
    exit_code: int | None
    sources: str | None
    outcome: Outcome
    found: bool
    why: str | None
    diagnosis: Diagnosis
    reported: tuple[FailureRecord, ...] = ()
    ending: str | None = None
    recorded: Explanation | None = None
    hints: tuple[str, ...] = ()
    symptoms: tuple[Symptom, ...] = ()


def make_report(
    diagnosis: Diagnosis,
    *,
    log: Log | None,
    exit_code: int | None,
    state: State | None,
    own_log: bool,
    now: datetime,
) -> Report:
    """Put together what is known.

    Args:
        diagnosis: of the log and the exit code.
        log: what was read.
        exit_code: as it was given.
        state: what was read.
        own_log: whether ``log`` is the one in ``state``.
        now: the present moment, which tells whether a start still runs.
    """
    supervisor = None if state is None else state.journal.supervisor
    ending = None if supervisor is None else supervisor.ending
    reported = () if state is None else state.journal.failures
    recorded = None if ending is None else ending.explanation
    name = None if log is None else log.name
    outcome, why = Outcome.FAILED, None
    if diagnosis.finding is None and not reported and recorded is None:
        outcome, why = _without_a_cause(diagnosis, name, exit_code, supervisor, now)
    return Report(
        state=None if state is None else str(state.directory),
        log=name,
        exit_code=exit_code,
        sources=None
        if state is None or log is None or own_log
        else f"the ending is from --state {state.directory}, what is said of a log from --log {log.name}",
        outcome=outcome,
        found=outcome is Outcome.FAILED,
        why=why,
        diagnosis=diagnosis,
        reported=reported,
        ending=None if supervisor is None else _ending(supervisor),
        recorded=recorded,
        hints=tuple(_hints(diagnosis, log, state, outcome)),
        symptoms=tuple(
            Symptom(name=row.name, cause=row.cause, remedy=row.remedy)
            for row in load_catalogue().symptoms
            if outcome is Outcome.UNKNOWN
        ),
    )


def as_lines(report: Report) -> Iterator[str]:
    """The report for people."""
    diagnosis = report.diagnosis
    if report.sources is not None:
        yield f"note: {report.sources}"
    if report.ending is not None:
        yield f"ending: {report.ending}"
    for failure in report.reported:
        yield f"reported by pid {failure.pid}: {failure.what}"
        yield f"remedy: {failure.remedy}"
    finding = diagnosis.finding
    if finding is not None:
        yield from _finding(finding, earlier=diagnosis.earlier_start)
    elif report.recorded is not None:
        yield f"cause: {report.recorded.cause}"
        yield f"remedy: {report.recorded.remedy}"
        yield f"name: {report.recorded.name} (as the supervisor recorded it)"
    elif report.why is not None:
        yield report.why
    if report.outcome is Outcome.UNKNOWN and diagnosis.exception is not None:
        yield f"last exception: {diagnosis.exception}"
    for what, findings in (
        ("set aside because of exit code 0", diagnosis.set_aside),
        ("also seen", diagnosis.others),
        ("noticed", diagnosis.noticed),
    ):
        for other in findings:
            at = "" if other.line is None else f" (line {other.line})"
            yield f"{what}: {other.name}{at}: {other.cause}; {other.remedy}"
    if finding is None or finding.line is None:
        for error in diagnosis.errors:
            yield f"error line {error.line}: {error.text}"
    for hint in report.hints:
        yield f"note: {hint}"
    for symptom in report.symptoms:
        yield f"not visible in a log: {symptom.name}: {symptom.cause}; {symptom.remedy}"


def _without_a_cause(
    diagnosis: Diagnosis,
    log: str | None,
    exit_code: int | None,
    supervisor: SupervisorRecord | None,
    now: datetime,
) -> tuple[Outcome, str]:
    where = "what was given" if log is None else f"{log} ({diagnosis.lines} lines)"
    unknown = Outcome.UNKNOWN, f"unknown: no known failure in {where}"
    if diagnosis.set_aside:
        return Outcome.UNKNOWN, f"unknown: exit code 0 says that the engine ended well, and {where} does not"
    if exit_code == 0:
        return Outcome.ENDED, "no failure: exit code 0 says that the engine ended well"
    if exit_code is not None:
        return unknown
    if supervisor is not None:
        return _by_the_record(supervisor, now) or unknown
    if diagnosis.ended_well:
        how = "ended on request" if diagnosis.asked_to_end else "ended in good order"
        return Outcome.ENDED, f"{how}, no failure: {where}"
    return unknown


def _by_the_record(supervisor: SupervisorRecord, now: datetime) -> tuple[Outcome, str] | None:
    if supervisor.ending is None:
        if not is_fresh(supervisor, now):
            return None
        what = "serving" if supervisor.phase is Phase.READY else f"running, phase {supervisor.phase}"
        return Outcome.RUNNING, f"{what}; nothing is known to be wrong"
    if supervisor.phase is Phase.STOPPED:
        return Outcome.ENDED, f"ended on request, no failure: {supervisor.ending.reason}"
    if supervisor.engine_pid is None:
        return Outcome.NOT_STARTED, "vLLM was not started; the ending says why"
    return None


def _hints(diagnosis: Diagnosis, log: Log | None, state: State | None, outcome: Outcome) -> Iterator[str]:
    supervisor = None if state is None else state.journal.supervisor
    if outcome is Outcome.UNKNOWN and supervisor is not None and supervisor.ending is None:
        yield "the supervisor is gone without an ending, as when it is killed; look in dmesg for oom-kill"
    if diagnosis.set_aside:
        yield "after a pipe $? is that of its last command; in bash ${PIPESTATUS[0]} is that of the first"
    if log is not None and outcome is Outcome.UNKNOWN:
        if diagnosis.silent:
            yield f"{log.name} is empty; catch vLLM's standard error, too (2>&1)"
        elif not diagnosis.is_vllm:
            yield f"{log.name} does not look like vLLM's log: no line is one of vLLM's"
    if log is not None:
        yield from log.hints
    if state is not None:
        yield from state.hints


def _finding(finding: Finding, *, earlier: bool) -> Iterator[str]:
    yield f"cause: {finding.cause}"
    yield f"remedy: {finding.remedy}"
    phase = "" if finding.phase is None else f", phase {finding.phase}"
    yield f"name: {finding.name} ({finding.level.description}{phase}; {finding.grade.description})"
    if finding.line is not None:
        start = " of an earlier start" if earlier else ""
        yield f"line {finding.line}{start}: {finding.text}"
    yield f"source: {finding.source}"


def _ending(supervisor: SupervisorRecord) -> str:
    if supervisor.ending is None:
        return f"none recorded; {supervisor.phase} when last heard of at {supervisor.updated_at:%F %T} UTC"
    return f"exit code {supervisor.ending.exit_code}: {supervisor.ending.reason}"
