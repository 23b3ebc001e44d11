# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 doctor``: what the catalogue makes of a log, an exit code, or what a start left behind."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import BaseModel, ConfigDict

from kimi_k3.diagnosis.catalogue import load_catalogue
from kimi_k3.diagnosis.match import Diagnosis, Finding, explain
from kimi_k3.diagnosis.scan import Evidence, Scanner
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.files import NotRegularFile, open_regular
from kimi_k3.journal.models import Explanation, FailureRecord, SupervisorRecord
from kimi_k3.journal.reader import Journal, read_journal
from kimi_k3.supervisor.logfile import EARLIER_LOG_FILE, LOG_FILE
from kimi_k3.words.environment import default_state_dir

READ_BYTES = 256 * 1024
STDIN = "-"


class Symptom(BaseModel):
    """A failure that no log shows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    cause: str
    remedy: str


class Report(BaseModel):
    """The answer; the JSON of ``--json``.

    ``reported`` is what the engine's processes said of themselves, which comes before the log; ``recorded``
    is what the supervisor made of the engine's death. ``symptoms`` are there when nothing was found.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    log: str | None
    exit_code: int | None
    found: bool
    diagnosis: Diagnosis
    reported: tuple[FailureRecord, ...] = ()
    ending: str | None = None
    recorded: Explanation | None = None
    hints: tuple[str, ...] = ()
    symptoms: tuple[Symptom, ...] = ()


def run_doctor(
    *, log: Path | str | None, exit_code: int | None, state_dir: Path | None, as_json: bool
) -> ExitCode:
    """Look, print, and return 0 if a cause was found, else 1.

    Args:
        log: a path, or ``-``.
        exit_code: of the engine.
        state_dir: of the start; the default one when neither of the others is given.
        as_json: print the report as JSON.

    Raises:
        OperatorError: something that was named cannot be read.
    """
    if exit_code is not None and not -64 <= exit_code <= 255:
        raise OperatorError(
            f"--exit-code {exit_code}: is not an exit code",
            remedy="give 0 to 255, or the negative number of a signal",
            exit_code=ExitCode.USAGE,
        )
    if log is None and exit_code is None and state_dir is None:
        state_dir = default_state_dir().expanduser().absolute()
    journal = None if state_dir is None else _journal(state_dir)
    hints: tuple[str, ...] = ()
    if log is None and state_dir is not None:
        if (state_dir / LOG_FILE).exists():
            log = state_dir / LOG_FILE
        if (state_dir / EARLIER_LOG_FILE).exists():
            hints = (f"an earlier part, or an earlier start: {state_dir / EARLIER_LOG_FILE}",)
    evidence = Evidence(silent=False) if log is None else _scan(log)
    report = make_report(
        explain(evidence, exit_code), log=log, exit_code=exit_code, journal=journal, hints=hints
    )
    print(report.model_dump_json(indent=1) if as_json else "\n".join(as_lines(report)))
    return ExitCode.OK if report.found else ExitCode.FAILED


def make_report(
    diagnosis: Diagnosis,
    *,
    log: Path | str | None,
    exit_code: int | None,
    journal: Journal | None,
    hints: tuple[str, ...],
) -> Report:
    """Put together what is known. Pure."""
    supervisor = journal.supervisor if journal is not None else None
    ending = supervisor.ending if supervisor is not None else None
    reported = journal.failures if journal is not None else ()
    recorded = ending.explanation if ending is not None else None
    found = diagnosis.finding is not None or bool(reported) or recorded is not None
    faults = () if journal is None else tuple(f"{fault.file}: {fault.why}" for fault in journal.faults)
    return Report(
        log=None if log is None else "standard input" if log == STDIN else str(log),
        exit_code=exit_code,
        found=found,
        diagnosis=diagnosis,
        reported=reported,
        ending=None if supervisor is None else _ending(supervisor),
        recorded=recorded,
        hints=(*faults, *hints),
        symptoms=()
        if found
        else tuple(
            Symptom(name=row.name, cause=row.cause, remedy=row.remedy) for row in load_catalogue().symptoms
        ),
    )


def as_lines(report: Report) -> Iterator[str]:
    """The report for people. Pure."""
    if report.ending is not None:
        yield f"ending: {report.ending}"
    for failure in report.reported:
        yield f"reported by pid {failure.pid}: {failure.what}"
        yield f"remedy: {failure.remedy}"
    finding = report.diagnosis.finding
    if finding is not None:
        yield from _finding(finding, earlier=report.diagnosis.earlier_start)
    elif report.recorded is not None:
        yield f"cause: {report.recorded.cause}"
        yield f"remedy: {report.recorded.remedy}"
        yield f"name: {report.recorded.name} (as the supervisor recorded it)"
    elif not report.reported:
        where = "what was given" if report.log is None else f"{report.log} ({report.diagnosis.lines} lines)"
        yield f"unknown: no known failure in {where}"
        if report.diagnosis.exception is not None:
            yield f"last exception: {report.diagnosis.exception}"
    for other in report.diagnosis.others:
        at = "" if other.line is None else f" (line {other.line})"
        yield f"also seen: {other.name}{at}: {other.cause}; {other.remedy}"
    if finding is None or finding.line is None:
        for error in report.diagnosis.errors:
            yield f"error line {error.line}: {error.text}"
    for hint in report.hints:
        yield f"note: {hint}"
    for symptom in report.symptoms:
        yield f"not visible in a log: {symptom.name}: {symptom.cause}; {symptom.remedy}"


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


def _journal(directory: Path) -> Journal:
    try:
        mode = directory.stat().st_mode
    except OSError as error:
        raise _unreadable("--state", directory, error, "give the --state-dir of the start") from None
    if not stat.S_ISDIR(mode):
        raise OperatorError(
            f"--state {directory}: it is not a directory",
            remedy="give the --state-dir of the start",
            exit_code=ExitCode.STATE,
        )
    journal = read_journal(directory)
    if journal.supervisor is None and not journal.faults and not (directory / LOG_FILE).exists():
        raise OperatorError(
            f"--state {directory}: nothing was started with it",
            remedy="give the --state-dir of the start, or a --log",
            exit_code=ExitCode.STATE,
        )
    return journal


def _scan(log: Path | str) -> Evidence:
    scanner = Scanner()
    if log == STDIN:
        _feed(scanner, sys.stdin.buffer, "standard input")
        return scanner.evidence()
    path = Path(log)
    try:
        with open_regular(path) as stream:
            _feed(scanner, stream, str(path))
    except NotRegularFile as error:
        raise OperatorError(
            f"--log {path}: {error.strerror}", remedy="give a file, or - and the log on standard input"
        ) from None
    except OSError as error:
        raise _unreadable("--log", path, error, "give the file with vLLM's output") from None
    return scanner.evidence()


def _feed(scanner: Scanner, stream: BinaryIO, name: str) -> None:
    try:
        while chunk := os.read(stream.fileno(), READ_BYTES):
            scanner.feed(chunk)
    except OSError as error:
        raise OperatorError(
            f"{name}: cannot be read: {error.strerror or error}", remedy="give vLLM's output as a file"
        ) from None


def _unreadable(option: str, path: Path, error: OSError, remedy: str) -> OperatorError:
    code = ExitCode.STATE if option == "--state" else ExitCode.FAILED
    return OperatorError(f"{option} {path}: {error.strerror or error}", remedy=remedy, exit_code=code)
