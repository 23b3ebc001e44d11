# SPDX-License-Identifier: Apache-2.0
"""One fault against the supervisor and the fake group, and what must be seen of it; :mod:`faults` runs many.

A case starts a supervisor in a fork (imports cost a second, forks do not), waits for a phase and a random
moment in it, does one thing to one process or one file, and looks at what a sidecar and an orchestrator see:
never ready over an engine that is not, the right phase within 2 s, the right exit code, nobody left.
Deadlines grow by the time in which the machine did not let this process run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kimi_k3.errors import OperatorError
from kimi_k3.journal.models import (
    STALE_AFTER_SECONDS,
    SUPERVISOR_FILE,
    CheckpointSummary,
    PhaseChange,
    RankRecord,
    SupervisorRecord,
    rank_file,
)
from kimi_k3.journal.reader import Journal, read_journal
from kimi_k3.journal.writer import now
from kimi_k3.sidecar.readiness import readiness_view
from kimi_k3.sidecar.view import EngineHealth, EngineOutcome
from kimi_k3.supervisor.leftovers import clear_leftovers
from kimi_k3.supervisor.lock import hold_lock
from kimi_k3.supervisor.outlet import Outlet
from kimi_k3.supervisor.processes import Mark, processes_of
from kimi_k3.supervisor.run import supervise
from kimi_k3.supervisor.signals import SAME_SECONDS
from kimi_k3.supervisor.start import Start
from kimi_k3.words import environment as names
from kimi_k3.words.phases import ENDED, Phase
from kimi_k3.words.weights import Weights
from tests.surroundings import SURROUNDINGS

FAKE = Path(__file__).with_name("fake_group.py")
RANKS = 2
PHASE_SECONDS = 0.1
HANG_SECONDS = 1.5
STALE_SECONDS = 4.0
START_SECONDS = 15.0
POLL_SECONDS = 0.06
SOON, GONE_WITHIN, PATIENCE = 2.0, 5.0, 30.0
"""Seconds: until the journal tells, until nobody is left, and until a case is given up."""

LINES = (
    "Loading safetensors checkpoint shards:   0% Completed | 0/3",
    "INFO Loading weights took 0.10 seconds",
    "INFO Model loading took 0.1 GiB memory and 0.200000 seconds",
    "Capturing CUDA graph",
    "INFO init engine (profile, create kv cache, warmup model) took 1.00 s",
)
PHASES = (Phase.LOADING, Phase.CONVERTING, Phase.COMPILING, Phase.CAPTURING, Phase.WARMING, Phase.READY)
KILLS = ("kill-supervisor", "kill-api", "kill-core", "kill-worker")
FILES = ("truncated", "corrupted", "future", "version", "foreign", "directory", "ended-before")
ROUND = (
    *[(kill, phase) for kill in KILLS for phase in PHASES],
    *[(fault, phase) for fault in ("stop-worker", "stop-core", "stop-api") for phase in PHASES[::5]],
    ("stop-and-continue", Phase.READY),
    ("stop-supervisor", Phase.READY),
    ("kill-core", Phase.DRAINING),
    ("kill-worker", Phase.DRAINING),
    ("kill-supervisor", Phase.DRAINING),
    *[("term", phase) for phase in PHASES[::5]],
    *[(f"journal-{file}", phase) for file in FILES for phase in PHASES[::5]],
    *[("disk-full", phase) for phase in PHASES[::5]],
    ("rank-corrupted", Phase.READY),
)
"""Every fault in every phase in which it makes a difference; a run goes round in random orders."""


class Wrong(Exception):
    """A case did not end as it must."""


@dataclass
class Case:
    """One supervisor with its engine."""

    number: int
    seed: int
    fault: str
    phase: Phase
    directory: Path

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.seed}-{self.number}")
        self.state_dir = self.directory / "state"
        self.state_dir.mkdir(parents=True)
        self.start_id = f"case-{os.getpid()}-{self.number}"
        self.port = self.free_port()
        self.go = self.directory / "go"
        self.rank = self.random.randrange(RANKS)
        self.attentive = self.random.random() < 0.3
        self.fast = self.phase is Phase.DRAINING
        self.starting = self.phase.position < Phase.READY.position
        self.code: int | None = None
        self.down_at: float | None = None
        self.waited: dict[int, float] = {}

    def free_port(self) -> int:
        """One of its own, below those that the kernel gives to connections."""
        for port in range(20000 + self.number, 30000, 1000):
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                return port
        raise Wrong("no free port")

    # What is started.

    def record(self) -> SupervisorRecord:
        moment = now()
        return SupervisorRecord(
            start_id=self.start_id,
            pid=os.getpid(),
            started_at=moment,
            updated_at=moment,
            profile="cpu-tiny",
            checkpoint=CheckpointSummary(
                name="k3", total_bytes=1, shards=1, decoder_layers=1, moe_layers=(), experts=1
            ),
            served_model_name="kimi-k3",
            weights=Weights.MXFP4,
            requantisation=None,
            consent=None,
            world_size=RANKS,
            engine_url=f"http://127.0.0.1:{self.port}",
        )

    def plan(self) -> dict[str, Any]:
        moment = now()
        phases = tuple(PhaseChange(phase=phase, at=moment) for phase in PHASES[:3])
        ranks = [
            RankRecord(
                start_id=self.start_id,
                rank=rank,
                pid=1,
                updated_at=moment,
                weights=Weights.MXFP4,
                requantisation=None,
                phases=phases,
            )
            for rank in range(RANKS)
        ]
        return {
            "state_dir": str(self.state_dir),
            "pids": str(self.directory / "pids.json"),
            "port": self.port,
            "attentive": self.attentive,
            "phase_seconds": PHASE_SECONDS,
            "hold": PHASES.index(self.phase) + 1 if self.starting else None,
            "go": str(self.go),
            # What is killed in a drain must still be there.
            "drain_seconds": 0.0 if not self.fast else 0.5 if self.fault == "kill-worker" else 20.0,
            "lines": LINES,
            "summaries": [rank.summary().line() for rank in ranks],
            "ranks": [rank.model_dump(mode="json") for rank in ranks],
        }

    def supervisor(self) -> int:
        """In the fork: what ``kimi-k3 serve`` does with a decided start, and its exit code."""
        start = Start(
            record=self.record(),
            argv=(sys.executable, "-S", "-E", str(FAKE), str(self.directory / "plan.json")),
            state_dir=self.state_dir,
            socket_dir=self.directory / "sockets",
            environment={
                **SURROUNDINGS,
                names.STATE_DIR: str(self.state_dir),
                names.START_ID: self.start_id,
            },
            api_key=None,
            start_timeout=10 * PATIENCE,
            drain_timeout=20.0,
            readiness_delay=1.0 if self.fast and self.random.random() < 0.5 else 0.0,
            hang_timeout=HANG_SECONDS,
            checks=(),
        )
        report = Outlet((self.directory / "supervisor.log").open("w", buffering=1))
        try:
            with hold_lock(self.state_dir):
                clear_leftovers(self.state_dir, report=report)
                return supervise(start, report=report, forward=report)
        except OperatorError as error:
            report(f"error: {error}")
            return int(error.exit_code)

    # What is seen.

    def journal(self) -> Journal:
        return read_journal(self.state_dir)

    def ready(self) -> bool:
        """What a sidecar beside it would say this moment."""
        journal = self.journal()
        if journal.supervisor is None or journal.supervisor.stalled_since is not None:
            return False
        # As if it had been asked later, so that no case waits as long as a sidecar does.
        later = now() + timedelta(seconds=STALE_AFTER_SECONDS - STALE_SECONDS)
        return readiness_view(journal, self.health(), later).ready

    def health(self) -> EngineHealth:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=0.5) as connection:
                connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                healthy = connection.recv(64).startswith(b"HTTP/1.0 200")
        except OSError:
            healthy = False
        moment = now()
        return EngineHealth(
            outcome=EngineOutcome.HEALTHY if healthy else EngineOutcome.UNREACHABLE,
            status_code=200 if healthy else None,
            detail="",
            checked_at=moment,
            seconds=0.0,
            since=moment,
        )

    def present(self) -> Phase:
        supervisor = self.journal().supervisor
        return Phase.PENDING if supervisor is None else supervisor.phase

    def poll(self) -> int | None:
        """Exit code as :mod:`subprocess` gives it."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def left(self) -> tuple[int, ...]:
        pids = self.pids()
        mark = Mark(self.start_id, self.state_dir, session=pids[0] if pids else None)
        return processes_of(mark)

    def pids(self) -> list[int]:
        """API server, core, workers."""
        with contextlib.suppress(FileNotFoundError):
            return list(json.loads((self.directory / "pids.json").read_text()))
        return []

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait for it; ready meanwhile over an engine that is broken is wrong in any case."""
        begun = self.clock()
        while not condition():
            self.look()
            if self.clock() - begun > seconds:
                raise Wrong(f"not within {seconds:g} s: {what}")
            time.sleep(POLL_SECONDS)

    def clock(self) -> float:
        """Seconds, without those in which this process, the supervisor or the API server got no core."""
        for pid in (os.getpid(), self.pid, *self.pids()[:1]):
            with contextlib.suppress(OSError, IndexError):
                waited = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
                self.waited[pid] = max(waited, self.waited.get(pid, 0.0))
        return time.monotonic() - sum(self.waited.values())

    def look(self) -> None:
        if self.down_at is not None and self.clock() - self.down_at > SOON and self.ready():
            raise Wrong("ready, over an engine that is not")

    # The case.

    def run(self) -> None:
        (self.directory / "plan.json").write_text(json.dumps(self.plan()))
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                code = self.supervisor()
            finally:
                os._exit(code)
        try:
            self.reach()
            self.inflict()
        finally:
            self.clear()

    def reach(self) -> None:
        first = Phase.READY if self.fast else self.phase
        self.wait(f"phase {first}", lambda: bool(self.pids()) and self.present() is first, START_SECONDS)
        if self.fast:
            os.kill(self.pid, signal.SIGTERM)
            self.wait("phase draining", lambda: self.present() is Phase.DRAINING, SOON)
            if self.ready():
                raise Wrong("ready while draining")
            time.sleep(0.1)
        else:
            begun, rest = self.clock(), self.random.uniform(0.0, 0.4)
            while self.clock() - begun < rest:
                time.sleep(POLL_SECONDS)

    def inflict(self) -> None:
        kind, _, detail = self.fault.partition("-")
        if self.fault == "stop-and-continue":
            self.stop_and_continue()
        elif self.fault == "stop-supervisor":
            self.stop_supervisor()
        elif kind == "kill":
            self.kill(detail)
        elif kind == "stop":
            self.stop(detail)
        elif kind == "journal":
            self.damage(SUPERVISOR_FILE, detail)
        elif kind == "rank":
            self.damage(rank_file(self.rank), detail)
        elif kind == "disk":
            self.fill_disk()
        else:
            self.terminate()

    def kill(self, whom: str) -> None:
        api, core, *workers = self.pids()
        victim = {"supervisor": self.pid, "api": api, "core": core, "worker": workers[self.rank]}[whom]
        os.kill(victim, signal.SIGKILL)
        self.down_at = self.clock()
        if self.fast and whom != "supervisor":
            # It was asked to end, and has: what was in it is lost, and what the drain waits for is gone.
            self.expect(None, (0, 7), GONE_WITHIN + 2.0)
            return
        self.expect(Phase.FAILED, (-9,) if whom == "supervisor" else (7,), GONE_WITHIN)
        record = self.journal().supervisor
        if record is None or record.ending is None:
            raise Wrong("no ending")
        wanted: tuple[str, ...] = ()
        if whom == "supervisor":
            wanted = ("the supervisor was killed",)
        elif whom == "api":
            wanted = ("vLLM failed",)
        elif not self.attentive:
            # The rank is named where its record had been read.
            wanted = (
                ("EngineCore",)
                if whom == "core"
                else (f"Worker_TP{self.rank}", f"rank {self.rank}", "Worker_TP (")
            )
        if wanted and not any(each in record.ending.reason for each in wanted):
            raise Wrong(f"reason: {record.ending.reason}")

    def stop(self, whom: str) -> None:
        api, core, *workers = self.pids()
        os.kill({"api": api, "core": core, "worker": workers[self.rank]}[whom], signal.SIGSTOP)
        self.down_at = self.clock()
        self.wait("stalled", self.stalled, SOON)
        if not self.starting:
            self.expect(None, (7,), HANG_SECONDS + GONE_WITHIN)
            return
        # A start that hangs would be ended by its timeout; whoever asks twice need not wait for that.
        os.kill(self.pid, signal.SIGTERM)
        time.sleep(2 * SAME_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        self.expect(None, (143,), GONE_WITHIN)

    def stalled(self) -> bool:
        supervisor = self.journal().supervisor
        return supervisor is not None and supervisor.stalled_since is not None

    def stop_and_continue(self) -> None:
        worker = self.pids()[2 + self.rank]
        os.kill(worker, signal.SIGSTOP)
        self.wait("stalled", self.stalled, SOON)
        os.kill(worker, signal.SIGCONT)
        self.wait("ready again", self.ready, SOON)
        self.terminate()

    def stop_supervisor(self) -> None:
        """And the core with it: the API server's /health still answers, and nobody watches."""
        core = self.pids()[1]
        for pid in (self.pid, core):
            os.kill(pid, signal.SIGSTOP)
        self.wait("not ready", lambda: not self.ready(), STALE_SECONDS + SOON)
        self.down_at = self.clock() - SOON
        self.look()
        os.kill(self.pid, signal.SIGCONT)
        self.expect(None, (7,), HANG_SECONDS + GONE_WITHIN)

    def terminate(self) -> None:
        started = self.present() is Phase.READY
        os.kill(self.pid, signal.SIGTERM)
        self.down_at = self.clock()
        self.expect(None, (0,) if started else (0, 143), GONE_WITHIN)

    def damage(self, file: str, how: str) -> None:
        path = self.state_dir / file
        document = json.loads(path.read_text())
        later = (datetime.now(tz=UTC) + timedelta(days=300)).isoformat()
        if how == "truncated":
            path.write_bytes(path.read_bytes()[: self.random.randrange(path.stat().st_size)])
        elif how == "corrupted":
            path.write_bytes(self.random.randbytes(self.random.randrange(1, 5000)))
        elif how == "directory":
            while not path.is_dir():
                # The next record may come between the two.
                with contextlib.suppress(FileExistsError):
                    path.unlink()
                    path.mkdir()
        else:
            changes = {
                "future": {"updated_at": later, "started_at": later},
                "version": {"schema_version": 2},
                "foreign": {"start_id": "another"},
                "ended-before": {"phases": [], "canary": None},
            }[how]
            path.write_text(json.dumps(document | changes))
        if self.phase is not Phase.READY and self.ready():
            raise Wrong("ready by a damaged journal")
        if how == "directory":
            # It cannot be written any more; nobody is told that it is ready, and serving goes on.
            self.down_at = self.clock() - SOON
            time.sleep(1.5)
            self.look()
            if self.poll() is not None:
                raise Wrong("ended by a journal")
            path.rmdir()
            self.down_at = None
        self.go.touch()
        self.wait("the journal heals", lambda: self.healed(path), SOON)
        self.wait("ready", self.ready, START_SECONDS)
        self.terminate()

    def healed(self, path: Path) -> bool:
        if path.name != SUPERVISOR_FILE:
            return self.present() is Phase.READY
        record = self.journal().supervisor
        return record is not None and record.start_id == self.start_id and bool(record.phases)

    def fill_disk(self) -> None:
        # As a full disk, for this process only: every write to a file fails, pipes and sockets work.
        for pid in (self.pid, self.pids()[0]):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        begun = time.monotonic()
        while time.monotonic() - begun < 1.5:
            if self.poll() is not None:
                raise Wrong("ended by a full disk")
            time.sleep(0.05)
        for pid in (self.pid, self.pids()[0]):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.go.touch()
        self.wait("ready", self.ready, START_SECONDS)
        self.terminate()

    def expect(self, phase: Phase | None, codes: tuple[int, ...], seconds: float) -> None:
        """The journal tells ``phase`` soon, the supervisor ends, and with it everybody else."""
        begun = self.clock()
        if phase is not None:
            self.wait(f"phase {phase}", lambda: self.present() is phase, SOON)
        self.wait("the supervisor ends", lambda: self.poll() is not None, seconds)
        if self.code not in codes:
            raise Wrong(f"exit code {self.code}, not {codes}")
        self.wait("nobody is left", lambda: not self.left(), max(0.1, begun + seconds - self.clock()))
        if self.ready() or self.present() not in ENDED:
            raise Wrong(f"ended in phase {self.present()}")

    def clear(self) -> None:
        for pid in (self.pid, *self.left()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.code is None:
            os.waitpid(self.pid, 0)
