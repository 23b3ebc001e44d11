# SPDX-License-Identifier: Apache-2.0
"""One look at a running engine: go on to the next phase, or say why it failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlsplit

from kimi_k3.diagnosis.match import Diagnosis, explain
from kimi_k3.diagnosis.scan import Scanner
from kimi_k3.journal.models import NODE_SILENT_SECONDS, Canary, RankRecord, RankSummary
from kimi_k3.journal.reader import Journal, read_journal
from kimi_k3.supervisor import verdict
from kimi_k3.supervisor.acceptance import objection
from kimi_k3.supervisor.announced import Announced
from kimi_k3.supervisor.canary import ask_canary
from kimi_k3.supervisor.child import Child
from kimi_k3.supervisor.group import Group, named
from kimi_k3.supervisor.health import Health
from kimi_k3.supervisor.heartbeat import Heartbeat
from kimi_k3.supervisor.leader import LOST_SECONDS
from kimi_k3.supervisor.listening import is_foreign
from kimi_k3.supervisor.logfile import LOG_FILE
from kimi_k3.supervisor.nodes import LEAVING, Hearing, leaving_node, lost_node
from kimi_k3.supervisor.phases import starting_phase
from kimi_k3.supervisor.processes import is_running
from kimi_k3.supervisor.recorder import Recorder
from kimi_k3.supervisor.start import Start
from kimi_k3.words.phases import Phase

SERVING = (Phase.READY, Phase.DRAINING)

JOURNAL_SECONDS = 0.5
"""How often the ranks' records are read: 8 of 120 kB take about 20 ms."""

PATIENCE_SECONDS = 5.0
"""A process that reported its failure, a report that is missing: vLLM, or the report, gets so long to follow
before the start is ended."""

GONE_SECONDS = 1.0
"""A process that is gone: vLLM gets so long to say why. The journal shall tell within 2 s."""

LEFT_ALONE_SECONDS = 0.8
"""For which the first node is asked whether it stops; its sidecar reads its journal at most 0.5 s late."""

SERVING_FIND_SECONDS = 10.0
"""How often new processes of the engine are looked for while it serves; in a start at every look."""

OUTPUT_SECONDS = 1.0
"""How long the reader may take for what a dead engine last printed."""


class Follower:
    """Looks at the engine again and again."""

    def __init__(
        self,
        start: Start,
        recorder: Recorder,
        child: Child,
        health: Health,
        heart: Heartbeat,
        group: Group,
        scanner: Scanner,
        *,
        report: Callable[[str], None],
    ) -> None:
        self._start = start
        self._recorder = recorder
        self._child = child
        self._health = health
        self._heart = heart
        self._group = group
        self._found_at = float("-inf")
        self._lost: str | None = None
        self._stopped_since: float | None = None
        self._scanner = scanner
        self._report = report
        self._log = start.state_dir / LOG_FILE
        self._journal: Journal | None = None
        self._journal_at = 0.0
        self._waiting: dict[str, float] = {}
        self._hearing = Hearing()
        self._canary: Answer | None = None
        self._answers_itself = False
        self._was_ok = True

    def look(self, announced: Announced) -> None:
        """Look once.

        Args:
            announced: what the engine's output has told.

        Raises:
            OperatorError: the start failed, or the engine died while serving.
        """
        exit_code = self._child.poll()
        if exit_code is not None:
            self._child.read_to_end(seconds=OUTPUT_SECONDS)
            raise self._death(self._read(), exit_code)
        journal = self._recent_journal()
        self._look_at_nodes(journal)
        if self._lasts("failure", bool(journal.failures)):
            raise self._death(journal, None)
        whole = self._whole(journal)
        if self._lasts("shutdown", announced.shuts_down, seconds=GONE_SECONDS):
            # A process that died between two looks, and that vLLM has missed: it waits for the others now.
            raise self._death(journal, None)
        serves = self._recorder.phase in SERVING
        self._look_for_stall(journal, serves=serves)
        if serves:
            self._note_health()
        elif whole:
            self._go_on(journal, announced)

    def leaving(self) -> str | None:
        """Who else of the deployment was asked to stop, in words: this node then stops with it."""
        if self._start.leader is not None:
            return "the first node stops" if self._start.leader.phase in LEAVING else None
        node = leaving_node(self._recent_journal())
        return None if node is None else f"node {node.node} stops"

    def left_alone(self) -> str | None:
        """What :meth:`leaving` tells once the first node has been asked again.

        Its end takes this node's engine along, perhaps before this node was told.
        """
        deadline = time.monotonic() + LEFT_ALONE_SECONDS
        while (leader := self._start.leader) is not None and time.monotonic() < deadline:
            leader.ask_now.set()
            if leader.phase in LEAVING:
                break
            time.sleep(0.1)
        return self.leaving()

    def _look_at_nodes(self, journal: Journal) -> None:
        """Whether the other nodes are still there.

        Raises:
            OperatorError: one is not.
        """
        # What serves outlives a sidecar that is away for a while; a node that is gone for longer hangs.
        serving = self._recorder.phase in SERVING
        patience = max(LOST_SECONDS, self._start.hang_timeout) if serving else LOST_SECONDS
        if (leader := self._start.leader) is None:
            silences = self._hearing.silences(journal, time.monotonic())
            why = lost_node(journal, silences, patience=patience)
        elif leader.refusal is not None:
            why = leader.refusal
        elif leader.silence() > patience:
            why = f"nothing new was heard of the first node for {leader.silence():.0f} s: {leader.problem}"
        elif leader.phase is Phase.FAILED and leader.record is not None and leader.record.ending is not None:
            why = f"the first node failed: {leader.record.ending.reason}"
        else:
            why = None
        if leader is not None:
            silence = leader.silence()
            self._recorder.note_leader(silence if silence > NODE_SILENT_SECONDS else None)
        if why is not None:
            raise verdict.lost_node(why=why, phase=self._recorder.phase, seconds=self._recorder.seconds())

    def _ranks_here(self, journal: Journal) -> list[RankRecord]:
        """Ranks whose processes are on this machine."""
        here = self._recorder.record.ranks_here
        return [rank for rank in journal.ranks if rank.rank in here]

    def _whole(self, journal: Journal) -> bool:
        """Whether no process is gone.

        Raises:
            OperatorError: one is, and vLLM has not ended by it.
        """
        every = SERVING_FIND_SECONDS if self._recorder.phase in SERVING else 0.0
        if time.monotonic() - self._found_at >= every:
            self._group.find(self._ranks_here(journal))
            self._found_at = time.monotonic()
        gone = self._group.gone()
        known = {member.pid for member in gone}
        ranks = self._ranks_here(journal)
        silent = [rank for rank in ranks if rank.pid not in known and not is_running(rank.pid)]
        # The first one that is gone is why the others follow.
        if self._lost is None and (gone or silent):
            also = [f"rank {rank.rank} (pid {rank.pid})" for rank in silent]
            self._lost = ", ".join(part for part in (named(gone, ranks), *also) if part)
        if self._lasts("gone", bool(gone or silent), seconds=GONE_SECONDS):
            assert self._lost is not None
            raise verdict.lost_process(
                who=self._lost,
                phase=self._recorder.phase,
                seconds=self._recorder.seconds(),
                found=self._diagnose(None),
                log=self._log,
            )
        return not gone and not silent

    def _look_for_stall(self, journal: Journal, *, serves: bool) -> None:
        stopped = self._group.stopped()
        moment = time.monotonic()
        if not stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = moment
        moments = [each for each in (self._stopped_since, self._heart.stalled_since) if each is not None]
        seconds = moment - min(moments) if moments else None
        if (seconds is None) is not (self._recorder.record.stalled_since is None):
            who = f": {named(stopped, self._ranks_here(journal))} is stopped" if stopped else ""
            self._report("the engine gets on again" if seconds is None else f"the engine is stalled{who}")
        self._recorder.note_stalled(seconds)
        if serves and seconds is not None and seconds >= self._start.hang_timeout:
            raise verdict.hung(
                phase=self._recorder.phase,
                seconds=seconds,
                stopped=named(stopped, self._ranks_here(journal)) or None,
                timeout=self._start.hang_timeout,
                log=self._log,
            )

    def _go_on(self, journal: Journal, announced: Announced) -> None:
        record = self._recorder.record
        self._recorder.enter(
            starting_phase(
                record.phase,
                ranks=journal.ranks,
                world_size=len(record.ranks_known),
                expected_conversions=record.expected_conversions,
                log=announced.phase,
                healthy=self._healthy(),
            )
        )
        self._recorder.note_step(announced.step)
        self._recorder.note_cache(announced.kv_cache_bytes)
        if self._start.leader is not None:
            if self._start.leader.phase is Phase.READY:
                self._group.find(self._ranks_here(journal))
                self._recorder.enter(Phase.READY)
                return
        elif self._canary is not None:
            if (canary := self._canary.get()) is not None:
                self._group.find(self._ranks_here(journal))
                self._recorder.note_canary(canary)
                self._heart.listening.set()
                self._recorder.enter(Phase.READY)
                return
        elif self._answers_itself:
            # Read afresh: the health may be newer than the journal last read.
            afresh = self._read()
            absent = afresh.absent_nodes
            problem = objection(record, _summaries(afresh, announced)) or (
                f"node {', '.join(map(str, absent))} has not joined" if absent else None
            )
            if problem is None:
                self._canary = self._ask()
            elif self._lasts("objection", True):
                raise verdict.not_accepted(problem, log=self._log)
        seconds = self._recorder.seconds()
        if seconds > self._start.start_timeout:
            raise verdict.too_slow(
                phase=self._recorder.phase,
                seconds=seconds,
                timeout=self._start.start_timeout,
                in_phase=self._recorder.seconds_in_phase(),
                absent=journal.absent_nodes,
                asked=self._canary is not None,
                log=self._log,
            )

    def _healthy(self) -> bool:
        """Whether the engine answers; of a node without an API the first one tells.

        Raises:
            OperatorError: another server answers on the engine's port.
        """
        if (leader := self._start.leader) is not None:
            return leader.phase in (Phase.WARMING, *SERVING)
        url = self._start.record.engine_url
        if self._health.ok and url is not None and not self._answers_itself:
            port = urlsplit(url).port
            assert port is not None, "every engine's URL has one"
            foreign = is_foreign(port, self._group.pids)
            if self._lasts("foreign", foreign, seconds=GONE_SECONDS):
                raise verdict.taken_port(
                    port=port, phase=self._recorder.phase, seconds=self._recorder.seconds()
                )
            # Nobody else can listen there once the engine does.
            self._answers_itself = not foreign
        return self._health.ok and self._answers_itself

    def _ask(self) -> Answer:
        record = self._start.record
        assert record.engine_url is not None, "a node without an API asks nobody"
        url = record.engine_url
        left = max(1.0, self._start.start_timeout - self._recorder.seconds())
        return Answer(
            lambda: ask_canary(url, record.served_model_name, api_key=self._start.api_key, timeout=left)
        )

    def _note_health(self) -> None:
        """Only for the log: a busy engine may be late with its answer and still serve."""
        if self._start.leader is not None:
            return
        if self._health.ok is not self._was_ok:
            self._was_ok = self._health.ok
            status = self._health.status
            self._report(f"/health: {'no answer' if status is None else status}")

    def _lasts(self, name: str, condition: bool, *, seconds: float | None = None) -> bool:
        """Whether ``condition`` has held at every look for ``seconds``, else ``PATIENCE_SECONDS``."""
        if not condition:
            self._waiting.pop(name, None)
            return False
        since = self._waiting.setdefault(name, time.monotonic())
        return time.monotonic() - since >= (PATIENCE_SECONDS if seconds is None else seconds)

    def _recent_journal(self) -> Journal:
        if self._journal is None or time.monotonic() - self._journal_at >= JOURNAL_SECONDS:
            self._journal = self._read()
        return self._journal

    def _read(self) -> Journal:
        self._journal_at = time.monotonic()
        return read_journal(self._start.state_dir)

    def _diagnose(self, exit_code: int | None) -> Diagnosis:
        # An engine that was started by this supervisor is no image that started a shell instead.
        return explain(replace(self._scanner.evidence(), silent=False), exit_code)

    def _death(self, journal: Journal, exit_code: int | None) -> verdict.EngineFailure:
        return verdict.death(
            phase=self._recorder.phase,
            seconds=self._recorder.seconds(),
            exit_code=exit_code,
            failures=journal.failures,
            found=self._diagnose(exit_code),
            log=self._log,
            lost=self._lost,
        )


def _summaries(journal: Journal, announced: Announced) -> list[RankSummary]:
    """What each rank says it serves: in the journal, or, where that cannot be written, in its node's log."""
    written = {rank.rank: rank.summary() for rank in journal.ranks}
    told = {each.rank: each for node in journal.nodes for each in node.summaries}
    return list((written | told | announced.summaries).values())


class Answer:
    """The canary's answer, asked for in a thread that nobody has to wait for."""

    def __init__(self, ask: Callable[[], Canary]) -> None:
        self._canary: Canary | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(ask,), name="canary", daemon=True)
        self._thread.start()

    def get(self) -> Canary | None:
        """The answer, ``None`` while there is none yet.

        Raises:
            OperatorError: the completion failed.
        """
        if self._error is not None:
            raise self._error
        return self._canary

    def _run(self, ask: Callable[[], Canary]) -> None:
        try:
            self._canary = ask()
        except Exception as error:  # a thread's exception would otherwise only be printed
            self._error = error
