# SPDX-License-Identifier: Apache-2.0
"""One start of the engine, from the first check to the last process gone.

A plain loop: look at everything, decide with the pure modules, write the heartbeat, sleep. Whatever
may take long (the engine's output, its health, its heartbeat, the first completion) has a thread of its own.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kimi_k3.diagnosis.scan import Scanner
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.journal.reader import read_journal
from kimi_k3.plan.budget import exit_deadline_seconds
from kimi_k3.supervisor.announced import Announced
from kimi_k3.supervisor.child import Child
from kimi_k3.supervisor.follow import Follower
from kimi_k3.supervisor.group import HEADLESS, MAIN, Group
from kimi_k3.supervisor.guardian import Guardian, guardian
from kimi_k3.supervisor.health import watched_health
from kimi_k3.supervisor.heartbeat import Heartbeat, watched_heartbeat
from kimi_k3.supervisor.leader import Leader, Told, told
from kimi_k3.supervisor.logfile import EngineLog
from kimi_k3.supervisor.processes import Mark, end_processes
from kimi_k3.supervisor.recorder import Recorder
from kimi_k3.supervisor.signals import received_signals
from kimi_k3.supervisor.start import Start
from kimi_k3.supervisor.termination import TERMINATION_LOG, write_termination_message
from kimi_k3.supervisor.verdict import EngineFailure
from kimi_k3.words.phases import Phase

TICK_SECONDS = 0.1
END_GRACE_SECONDS = 2.0
"""What the engine's processes get between SIGTERM and SIGKILL when the start has failed. Shorter
than the teardown of a served engine: nothing of theirs is worth waiting for, and 5 s after the first of them
died the last one is gone."""

SILENT_SECONDS = 60.0
"""A first node of which nothing new is heard for so long while both stop has ended."""

CORE_SECONDS = 3.0
"""What the API server gets in a drain once the engine core is gone: nobody finishes its requests any more."""

ENDED_BY_SIGTERM = (0, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of an engine that got a SIGTERM, as everybody in a control group does from systemd."""

REMAINS_GRACE_SECONDS = 1.0
"""The same for processes that outlived the main process, or its deadline."""


def supervise(
    start: Start,
    *,
    report: Callable[[str], None],
    forward: Callable[[str], None],
    termination_log: Path = TERMINATION_LOG,
) -> int:
    """Run ``start`` until it ends; call it while holding the state directory's lock.

    Args:
        report: gets the supervisor's own messages.
        forward: gets the engine's lines.
        termination_log: gets the reason of an ending with an error, if the file is there.

    Returns:
        The exit code: 0 when it was serving and was asked to end, 128 + signal when it was still
        starting.

    Raises:
        OperatorError: the start failed. No process of it is left.
    """
    recorder = Recorder(start.record, start.state_dir, report=report)
    announced = Announced()
    with received_signals() as signals, told(start.leader, lambda: _told(start, recorder, announced)):
        try:
            recorder.enter(Phase.PREFLIGHT)
            if not (_checked(start, recorder, signals) and _joined(start, recorder, signals, report=report)):
                return _stopped_early(recorder, signals[0], report=report)
            start_id, state_dir = start.record.start_id, start.state_dir
            with _socket_directory(start.socket_dir), guardian(start_id, state_dir) as guard:
                return _run_engine(start, recorder, announced, guard, signals, report=report, forward=forward)
        except OperatorError as error:
            _end_failed(recorder, error)
            raise
        except Exception as error:
            recorder.end(Phase.FAILED, ExitCode.FAILED, f"defect of the supervisor: {error!r}")
            raise
        finally:
            if (ending := recorder.record.ending) is not None and ending.exit_code != ExitCode.OK:
                write_termination_message(ending, termination_log)


def _told(start: Start, recorder: Recorder, announced: Announced) -> Told:
    """What the first node has to know of this one."""
    return Told(recorder.record, read_journal(start.state_dir).ranks, tuple(announced.summaries.values()))


def _end_failed(recorder: Recorder, error: OperatorError) -> None:
    explanation = error.explanation if isinstance(error, EngineFailure) else None
    recorder.end(Phase.FAILED, error.exit_code, str(error), explanation=explanation)


def _checked(start: Start, recorder: Recorder, signals: list[signal.Signals]) -> bool:
    """Whether all checks passed before a signal came.

    Raises:
        OperatorError: this machine cannot run the start.
    """

    def pause(seconds: float) -> bool:
        return _pause(seconds, recorder, signals)

    for check in start.checks:
        try:
            recorder.note_notices(check(pause))
        except OperatorError:
            # What was still wrong when somebody ended the wait is not why the start ends.
            if not signals:
                raise
    return not signals


def _pause(seconds: float, recorder: Recorder, signals: list[signal.Signals]) -> bool:
    """Sleep, and go on reporting; returns whether no signal came."""
    deadline = time.monotonic() + seconds
    while not signals and (left := deadline - time.monotonic()) > 0:
        recorder.beat()
        time.sleep(min(left, TICK_SECONDS))
    return not signals


def _joined(
    start: Start, recorder: Recorder, signals: list[signal.Signals], *, report: Callable[[str], None]
) -> bool:
    """Whether this node became part of the first one's start before a signal came; the first one is that.

    Raises:
        OperatorError: the first node refuses this one, or did not answer within the start timeout.
    """
    if (leader := start.leader) is None:
        return True
    waited_for = None
    leader.may_join.set()
    leader.ask_now.set()
    while not leader.joined:
        if leader.refusal is not None:
            raise OperatorError(leader.refusal, remedy=leader.remedy, exit_code=ExitCode.USAGE)
        if leader.problem is not None and waited_for is None:
            waited_for = leader.problem
            report(f"waiting for the first node's sidecar at {leader.url}: {waited_for}")
        if recorder.seconds() > start.start_timeout:
            raise OperatorError(
                f"the first node ({leader.url}) has no start to join after {recorder.seconds():.0f} s "
                f"(--start-timeout {start.start_timeout:g}): {leader.problem or 'no answer'}",
                remedy="look at the first node; check its address and that its sidecar can be reached",
            )
        if not _pause(TICK_SECONDS, recorder, signals):
            return False
    # How long a start may take counts from when it can begin.
    recorder.begin()
    report(f"part of the first node's start ({leader.url})")
    return True


def _stopped_early(recorder: Recorder, number: signal.Signals, *, report: Callable[[str], None]) -> int:
    report(f"{number.name} during {recorder.phase} after {recorder.seconds():.0f} s")
    code = 128 + number
    recorder.end(Phase.STOPPED, code, f"{number.name} during the start")
    report("stopped")
    return code


@contextlib.contextmanager
def _socket_directory(path: Path) -> Iterator[None]:
    """The directory of vLLM's sockets, gone when the start has ended."""
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        raise OperatorError(
            f"directory {path} for vLLM's sockets cannot be created: {error.strerror or error}",
            remedy="make room there, or set TMPDIR to another directory",
        ) from None
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _run_engine(
    start: Start,
    recorder: Recorder,
    announced: Announced,
    guard: Guardian,
    signals: list[signal.Signals],
    *,
    report: Callable[[str], None],
    forward: Callable[[str], None],
) -> int:
    log = EngineLog(start.state_dir, report=report)
    scanner = Scanner()

    def take(line: str) -> None:
        forward(line)
        log.write(line)
        announced.take(line)
        scanner.feed(line.encode(errors="replace") + b"\n")

    try:
        child = Child(start.argv, start.environment, secrets=start.secrets, sink=take)
    except OSError as error:
        log.close()
        raise OperatorError(
            f"cannot execute {start.argv[0]}: {error.strerror or error}",
            remedy="reinstall the Python environment of vLLM",
            exit_code=ExitCode.ENGINE,
        ) from None
    grace = END_GRACE_SECONDS
    try:
        guard.guard(child.pid)
        recorder.note_engine(child.pid)
        recorder.enter(Phase.LOADING)
        record = start.record
        mark = Mark(record.start_id, start.state_dir, session=child.pid)
        group = Group(mark, main=HEADLESS if record.headless else MAIN)
        with (
            watched_health(record.engine_url) as health,
            watched_heartbeat(record.engine_url, record.served_model_name, start.api_key) as heart,
        ):
            follower = Follower(start, recorder, child, health, heart, group, scanner, report=report)
            while not signals and (why := follower.leaving()) is None:
                try:
                    follower.look(announced)
                except EngineFailure:
                    if (why := follower.left_alone()) is None:
                        raise
                    break
                recorder.beat()
                time.sleep(TICK_SECONDS)
            why = signals[0].name if signals else why
            report(f"{why} during {recorder.phase} after {recorder.seconds():.0f} s")
            served = recorder.phase is Phase.READY
            # Readers stop sending requests before vLLM refuses new ones.
            recorder.enter(Phase.DRAINING)
            left = start.drain_timeout
            if served and start.leader is not None:
                left = _stay(start, start.leader, recorder, child, signals)
            elif served:
                left = _leave(start, recorder, child, signals, heart, lambda: follower.look(announced))
        patience = exit_deadline_seconds(left, serving=served)
        how = _drain(recorder, child, group, signals, patience=patience)
        if how is not None:
            report(how)
        code = int(ExitCode.OK) if served else 128 + (signals[0] if signals else signal.SIGTERM)
        grace = REMAINS_GRACE_SECONDS if len(signals) < 2 else 0.0
    except OperatorError as error:
        # Known at once, not only after the last process is gone.
        _end_failed(recorder, error)
        raise
    finally:
        _end_everything(start, child, grace=grace, report=report)
        log.close()
    when = "while serving" if served else "during the start"
    recorder.end(Phase.STOPPED, code, f"{why} {when}" + (f"; {how}" if how is not None and served else ""))
    report("stopped")
    return code


def _leave(
    start: Start,
    recorder: Recorder,
    child: Child,
    signals: list[signal.Signals],
    heart: Heartbeat,
    look: Callable[[], None],
) -> float:
    """Go on serving for the readiness delay, while readers already see that it is not ready.

    Several engines go on until no request is under way: at SIGTERM vLLM ends each that has none, although the
    others compute with its experts, and their requests with it.

    Returns:
        Seconds left of the drain timeout.

    Raises:
        OperatorError: the engine died meanwhile, with requests in it.
    """
    delayed = time.monotonic() + start.readiness_delay
    deadline = delayed + (start.drain_timeout if start.engines > 1 else 0.0)
    while (moment := time.monotonic()) < deadline and heart.idle_at < delayed and len(signals) < 2:
        try:
            look()
        except OperatorError:
            if child.poll() not in ENDED_BY_SIGTERM:
                raise
            break
        recorder.beat()
        time.sleep(TICK_SECONDS)
    return start.drain_timeout - max(0.0, moment - delayed)


def _stay(
    start: Start, leader: Leader, recorder: Recorder, child: Child, signals: list[signal.Signals]
) -> float:
    """Go on computing for the first node until it has finished its requests and ended.

    Returns:
        Seconds left of the drain timeout.
    """
    begun = time.monotonic()
    deadline = begun + start.readiness_delay + start.drain_timeout
    while time.monotonic() < deadline and len(signals) < 2 and child.poll() is None:
        ended = leader.record is not None and leader.record.ending is not None
        if ended or leader.refusal is not None:
            break
        if min(leader.silence(), time.monotonic() - begun) > SILENT_SECONDS:
            break
        recorder.beat()
        time.sleep(TICK_SECONDS)
    return min(start.drain_timeout, max(0.0, deadline - time.monotonic()))


def _drain(
    recorder: Recorder,
    child: Child,
    group: Group,
    signals: list[signal.Signals],
    *,
    patience: float,
) -> str | None:
    """Ask the engine to end and wait ``patience`` seconds; what is left afterwards is ended by force.

    Returns:
        What was not as it should be, since it may have cut requests off; ``None`` if all was well.
    """
    child.terminate()
    deadline = time.monotonic() + patience
    core_gone_at = None
    while child.poll() is None:
        if len(signals) > 1:
            return f"{signals[1].name} again: ending at once"
        if any(member.is_core for member in group.gone()):
            core_gone_at = core_gone_at or time.monotonic()
            if time.monotonic() - core_gone_at > CORE_SECONDS:
                return "the engine core is gone, the API server is not: ending it by force"
        if time.monotonic() > deadline:
            return f"vLLM did not end within {patience:.0f} s: ending it by force"
        recorder.beat()
        time.sleep(TICK_SECONDS)
    # Not a failure: with GPUs, processes also crash when all is done and their libraries are taken down.
    return None if child.poll() in ENDED_BY_SIGTERM else f"vLLM ended with exit code {child.poll()}"


def _end_everything(start: Start, child: Child, *, grace: float, report: Callable[[str], None]) -> None:
    mark = Mark(start.record.start_id, start.state_dir, session=child.pid)
    _, left = end_processes(mark, grace=grace)
    child.close(seconds=1.0)
    if left:
        report(f"pid {', '.join(map(str, left))} cannot be ended; a driver may hold it in the kernel")
