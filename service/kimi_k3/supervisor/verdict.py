# SPDX-License-Identifier: Apache-2.0
"""Why a start failed, in one line with a remedy. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kimi_k3.diagnosis.match import Diagnosis, Finding
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.journal.models import Explanation, FailureRecord
from kimi_k3.words.phases import STARTING, Phase


class EngineFailure(OperatorError):
    """vLLM failed; ``explanation`` is what the catalogue knows of it."""

    def __init__(self, what: str, *, remedy: str, explanation: Explanation | None = None) -> None:
        super().__init__(what, remedy=remedy, exit_code=ExitCode.ENGINE)
        self.explanation = explanation


def death(
    *,
    phase: Phase,
    seconds: float,
    exit_code: int | None,
    failures: Sequence[FailureRecord],
    found: Diagnosis,
    log: Path,
    lost: str | None = None,
) -> EngineFailure:
    """The engine ended by itself, or one of its processes gave up.

    What an engine process reported about itself comes before the catalogue's reading of the log,
    and that before what the exit code alone tells.

    Args:
        seconds: since the start began.
        exit_code: of the main process, as :mod:`subprocess` gives it; ``None`` while it runs.
        failures: reported by the engine's processes in this start, the first one first.
        found: what the diagnosis makes of the log and the exit code.
        log: where the whole log is.
        lost: the processes that were gone before it, in words.
    """
    when = f"vLLM failed {_during(phase)} after {seconds:.0f} s"
    if failures:
        return _error(f"{when}: {failures[0].what}", failures[0].remedy, _fatal(found))
    if known := _known(found, when, log):
        return known
    if lost is not None:
        return _error(f"{when}: {lost} is gone", _LOST_REMEDY.format(log=log))
    if exit_code is None:
        return _error(f"{when}: it ends its own processes", _LOST_REMEDY.format(log=log))
    ended = "without an error" if exit_code == 0 else f"with exit code {exit_code}"
    return _error(f"{when}: it ended {ended} and no known message", f"read the end of {log}")


_LOST_REMEDY = "look in dmesg for oom-kill, and read the end of {log}"


def lost_process(*, who: str, phase: Phase, seconds: float, found: Diagnosis, log: Path) -> EngineFailure:
    """A process that serving depends on is gone and vLLM did not end (vllm-project/vllm#32116).

    Args:
        who: the processes in words.
    """
    what = f"vLLM failed {_during(phase)} after {seconds:.0f} s: {who} is gone"
    if known := _known(found, what, log):
        return known
    return _error(what, _LOST_REMEDY.format(log=log))


def hung(*, phase: Phase, seconds: float, stopped: str | None, timeout: float, log: Path) -> EngineFailure:
    """The engine's processes live and nothing comes of it.

    Args:
        seconds: without progress.
        stopped: the processes that a signal stopped, in words.
    """
    why = (
        "requests make no progress and one more token did not come"
        if stopped is None
        else f"{stopped} is stopped (SIGSTOP)"
    )
    return _error(
        f"vLLM hangs {_during(phase)}: {why}, for {seconds:.0f} s (--hang-timeout {timeout:g})",
        f"read the end of {log}; raise --hang-timeout if a step may take longer"
        if stopped is None
        else "do not stop it; start again",
    )


def too_slow(
    *,
    phase: Phase,
    seconds: float,
    timeout: float,
    in_phase: float,
    absent: Sequence[int],
    asked: bool,
    log: Path,
) -> EngineFailure:
    """The start timeout is over.

    Args:
        absent: the nodes that have not joined, without which nothing is loaded.
        asked: whether the first completion was asked for.
        seconds: since the start began.
        in_phase: seconds since the present phase began.
    """
    what = f"the start is not ready after {seconds:.0f} s (--start-timeout {timeout:g})"
    if absent:
        return _error(
            f"{what}: node {', '.join(map(str, absent))} has not joined",
            "look at the log there; check that it runs and reaches this node's sidecar",
        )
    return _error(
        f"{what}: it is {_during(phase)} since {in_phase:.0f} s"
        + (", waiting for the first completion" if asked else ""),
        f"raise --start-timeout if it was getting on, else read the end of {log}",
    )


def lost_node(*, why: str, phase: Phase, seconds: float) -> EngineFailure:
    """Another node of the deployment is gone, without which this one computes nothing.

    Args:
        why: in words.
        seconds: since the start began.
    """
    return _error(
        f"the deployment cannot go on {_during(phase)} after {seconds:.0f} s: {why}",
        "read that node's own log; all nodes start again together",
    )


def taken_port(*, port: int, phase: Phase, seconds: float) -> EngineFailure:
    """Another server answers where the engine will be: its answers would be taken for the engine's."""
    return _error(
        f"the start cannot go on {_during(phase)} after {seconds:.0f} s: "
        f"another process listens on port {port}",
        f"end it (see: ss -ltnp 'sport = :{port}') or give another --port",
    )


def not_accepted(objection: str, *, log: Path) -> EngineFailure:
    """The engine answers, but not every rank did what was asked."""
    return _error(
        f"the engine is up but may not serve: {objection}",
        f"look for 'kimi_k3' in {log}",
    )


def _during(phase: Phase) -> str:
    return f"in phase {phase}" if phase in STARTING else f"while {phase.description}"


def _known(found: Diagnosis, what: str, log: Path) -> EngineFailure | None:
    """From the catalogue; else with the last exception, which nobody knows but everybody should see."""
    if (finding := _fatal(found)) is not None:
        return _error(f"{what}: {finding.cause}", f"{finding.remedy} (log: {log})", finding)
    if found.exception is not None:
        return _error(f"{what}: {found.exception}", f"read engine.log above that line (log: {log})")
    return None


def _fatal(found: Diagnosis) -> Finding | None:
    return found.finding if found.finding is not None and found.finding.level.fatal else None


def _error(what: str, remedy: str, finding: Finding | None = None) -> EngineFailure:
    return EngineFailure(what, remedy=remedy, explanation=None if finding is None else _explanation(finding))


def _explanation(finding: Finding) -> Explanation:
    return Explanation(**finding.model_dump(include=set(Explanation.model_fields)))
