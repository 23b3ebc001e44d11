# SPDX-License-Identifier: Apache-2.0
"""From what is in a log and an exit code to a cause and a remedy. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator

from pydantic import BaseModel, ConfigDict

from kimi_k3.diagnosis.catalogue import Catalogue, Failure, Grade, Level, Mark, load_catalogue
from kimi_k3.diagnosis.scan import ANSWERS_AFTER, ASKED_TO_END, Evidence, Scanner, Seen
from kimi_k3.words.phases import Phase


class _Result(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Finding(_Result):
    """A row of the catalogue that fits; ``line`` and ``text`` are ``None`` if the exit code says it."""

    name: str
    level: Level
    phase: Phase | None
    cause: str
    remedy: str
    source: str
    grade: Grade
    line: int | None
    text: str | None


class ErrorText(_Result):
    """A line of the log that looks like an error."""

    line: int
    text: str


class Diagnosis(_Result):
    """What can be said.

    Attributes:
        finding: why the engine ended, or what is wrong with one that runs; ``None`` if unknown.
        others: further rows that fit, the best first, notices left out.
        noticed: what is slow or not as asked; nothing ends because of it.
        set_aside: what the log says of a failure, which is not believed because the exit code is 0.
        exception: the last exception in the log, wrappers left out.
        errors: the last lines that look like errors, oldest first.
        lines: of the log.
        silent: whether nothing was printed at all.
        is_vllm: whether any line is one of vLLM's, or known.
        ended_well: whether the log ends with the orderly end of an engine that served.
        asked_to_end: whether the log says that a signal asked for it.
        earlier_start: whether this is of an earlier start in the log, the last one being without error.
    """

    finding: Finding | None
    others: tuple[Finding, ...] = ()
    noticed: tuple[Finding, ...] = ()
    set_aside: tuple[Finding, ...] = ()
    exception: str | None = None
    errors: tuple[ErrorText, ...] = ()
    lines: int = 0
    silent: bool = False
    is_vllm: bool = False
    ended_well: bool = False
    asked_to_end: bool = False
    earlier_start: bool = False


def explain(
    evidence: Evidence, exit_code: int | None = None, *, catalogue: Catalogue | None = None
) -> Diagnosis:
    """Rank what was seen: causes before effects and wrappers, the specific first, then the earliest line.

    A notice is never the answer. What nobody knows stays unknown.

    Args:
        evidence: of the log.
        exit_code: as :mod:`subprocess` or a shell gives it, ``None`` if not known.
        catalogue: the package's own if not given.
    """
    catalogue = catalogue or load_catalogue()
    code = None if exit_code is None else from_shell(exit_code)
    found = _explain(evidence, code, catalogue)
    nothing = found.finding is None and not evidence.errors and not found.ended_well
    if nothing and code is None and evidence.earlier is not None:
        before = _explain(evidence.earlier, None, catalogue)
        if before.finding is not None or before.errors:
            return before.model_copy(update={"earlier_start": True, "lines": evidence.lines})
    return found


def explain_lines(lines: Iterable[str], exit_code: int | None = None) -> Diagnosis:
    """The same for a few lines."""
    scanner = Scanner()
    for line in lines:
        scanner.feed(line.encode(errors="replace") + b"\n")
    return explain(scanner.evidence(), exit_code)


def from_shell(exit_code: int) -> int:
    """Shells and containers tell 128 + n for signal n, :mod:`subprocess` -n."""
    return 128 - exit_code if 128 < exit_code <= 128 + signal.NSIG else exit_code


def _explain(evidence: Evidence, code: int | None, catalogue: Catalogue) -> Diagnosis:
    ranked = sorted(
        _findings(evidence, code, catalogue),
        key=lambda pair: (
            pair[0].level.position,
            not pair[0].conditional,
            pair[1].line if pair[1] else evidence.lines + 1,
        ),
    )
    findings = [_finding(row, seen) for row, seen in ranked if row.level is not Level.NOTICE]
    # An engine's own word is more than a line, which may quote what it likes; no line is why silence ended.
    set_aside = [one for one in findings if code == 0 and one.line is not None]
    believed = [one for one in findings if one not in set_aside]
    best = next((one for one in believed if one.level.fatal), None)
    asked = ASKED_TO_END in evidence.marks
    in_order = "serving" in evidence.marks and (asked or "shut-down" in evidence.marks)
    return Diagnosis(
        finding=best,
        others=tuple(one for one in believed if one is not best),
        noticed=tuple(_finding(row, seen) for row, seen in ranked if row.level is Level.NOTICE),
        set_aside=tuple(set_aside),
        exception=evidence.exception,
        errors=tuple(ErrorText(line=error.line, text=error.text) for error in evidence.errors),
        lines=evidence.lines,
        silent=evidence.silent,
        is_vllm=evidence.is_vllm or bool(ranked),
        ended_well=in_order and not findings and not evidence.errors,
        asked_to_end=asked,
    )


def _findings(
    evidence: Evidence, code: int | None, catalogue: Catalogue
) -> Iterator[tuple[Failure, Seen | None]]:
    def is_there(name: str) -> bool:
        return name in evidence.marks or _says(catalogue.marks[name], code)

    for row in catalogue.failures:
        if not all(map(is_there, row.when)) or any(map(is_there, row.unless)):
            continue
        if row.silent and not evidence.silent:
            continue
        seen = evidence.rows.get(row.name)
        if seen is not None and not _is_over(row, seen, evidence):
            yield row, seen
        elif code is not None and code in row.exit_codes:
            yield row, None
        elif row.pattern is None and row.when:
            yield row, next((evidence.marks[name] for name in row.when if name in evidence.marks), None)


def _says(mark: Mark, code: int | None) -> bool:
    return code is not None and code in mark.exit_codes


def _is_over(row: Failure, seen: Seen, evidence: Evidence) -> bool:
    """Whether the engine went on after it, so that it cannot be why it ended."""
    passed = [name for name in (row.until, None if row.level is Level.NOTICE else "serving") if name]
    if any(name in evidence.marks and evidence.marks[name].line > seen.last for name in passed):
        return True
    return row.level is not Level.NOTICE and evidence.answered - seen.answered >= ANSWERS_AFTER


def _finding(row: Failure, seen: Seen | None) -> Finding:
    return Finding(
        **row.model_dump(include={"name", "level", "phase", "cause", "remedy", "source", "grade"}),
        line=seen.line if seen else None,
        text=seen.text if seen else None,
    )
