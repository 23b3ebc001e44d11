# SPDX-License-Identifier: Apache-2.0
"""Seeded kills of a real vLLM on the CPU with two ranks: ``python -m tests.serving.faults --seed N``.

Each case starts ``kimi-k3 serve``, waits for a phase, and kills (or stops) one process. The journal must tell
within 2 s, nobody may be left after 5 s, the exit code must be right.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kimi_k3.checkpoint import make_tiny_checkpoint
from kimi_k3.journal.models import SupervisorRecord
from kimi_k3.journal.reader import read_journal
from kimi_k3.words.phases import ENDED, Phase
from tests.ports import free_port
from tests.serving.deployment import COMMAND, START_SECONDS, TOY, Family, environment

SOON, GONE_WITHIN, HANG_SECONDS = 2.0, 5.0, 3.0
ROUND = (
    *[
        (fault, phase)
        for fault in ("kill-supervisor", "kill-api", "kill-core", "kill-worker")
        for phase in (Phase.LOADING, Phase.CONVERTING, Phase.COMPILING, Phase.READY)
    ],
    ("stop-worker", Phase.READY),
    ("stop-core", Phase.READY),
    ("kill-core", Phase.DRAINING),
    ("kill-supervisor", Phase.DRAINING),
)
QUICK = (("kill-worker", Phase.CONVERTING), ("kill-core", Phase.READY), ("stop-worker", Phase.READY))
"""What every run of the tests does; one start takes half a minute."""


class Wrong(Exception):
    """A case did not end as it must."""


@dataclass
class Case:
    """One start."""

    fault: str
    phase: Phase
    supervisor: subprocess.Popen[bytes]
    family: Family
    state_dir: Path
    chooser: random.Random
    waited: dict[int, float] = field(default_factory=dict)

    def record(self) -> SupervisorRecord | None:
        return read_journal(self.state_dir).supervisor

    def present(self) -> Phase:
        record = self.record()
        return Phase.PENDING if record is None else record.phase

    def wait(self, what: str, condition: Callable[[], bool], seconds: float) -> float:
        """Seconds of the wall's clock until it was so; the limit is by :meth:`clock`."""
        begun, wall = self.clock(), time.monotonic()
        while not condition():
            if self.clock() - begun > seconds:
                raise Wrong(f"not within {seconds:g} s: {what}")
            time.sleep(0.05)
        return round(time.monotonic() - wall, 2)

    def clock(self) -> float:
        """Seconds, without those in which this process or the supervisor got no core."""
        for pid in (os.getpid(), self.supervisor.pid):
            with contextlib.suppress(OSError, IndexError):
                waited = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
                self.waited[pid] = max(waited, self.waited.get(pid, 0.0))
        return time.monotonic() - sum(self.waited.values())

    def victim(self, whom: str) -> int:
        if whom == "supervisor":
            return self.supervisor.pid
        record = self.record()
        assert record is not None
        assert record.engine_pid is not None
        if whom == "api":
            return record.engine_pid
        title = {"core": "::EngineCore", "worker": "::Worker"}[whom]
        found: list[int] = []

        def look() -> bool:
            self.family.look()
            for child in psutil.Process(record.engine_pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if title in " ".join(child.cmdline()):
                        found.append(child.pid)
            return bool(found)

        self.wait(f"a process called {title}", look, START_SECONDS)
        return self.chooser.choice(sorted(set(found)))

    def reach(self) -> None:
        """Wait for the phase; one that is over at once may be seen too late."""
        wanted = Phase.READY if self.phase is Phase.DRAINING else self.phase

        def there() -> bool:
            self.family.look()
            if self.supervisor.poll() is not None:
                raise Wrong("the start failed by itself")
            return self.present().position >= wanted.position

        self.wait(f"phase {wanted}", there, START_SECONDS)
        if self.phase is Phase.DRAINING:
            self.supervisor.terminate()
            self.wait("phase draining", lambda: self.present() is Phase.DRAINING, SOON)

    def run(self) -> dict[str, Any]:
        self.reach()
        kind, whom = self.fault.split("-")
        pid = self.victim(whom)
        # One that dies in its first tenth of a second may be told only when the API server has ended by it.
        time.sleep(self.chooser.uniform(0.2, 2.0))
        self.family.look()
        seen = self.present()
        before, wall = self.clock(), time.monotonic()
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        told = None
        limit = GONE_WITHIN
        if kind == "stop":
            told = self.wait("stalled", self.stalled, SOON)
            limit += HANG_SECONDS
        elif self.phase is not Phase.DRAINING:
            told = self.wait("phase failed", lambda: self.present() is Phase.FAILED, SOON)
        self.wait("the supervisor ends", lambda: self.supervisor.poll() is not None, limit)
        self.wait("nobody is left", lambda: not self.family.left(), max(0.1, limit - (self.clock() - before)))
        gone = round(time.monotonic() - wall, 2)
        code = self.supervisor.wait()
        wanted = -9 if whom == "supervisor" else 0 if self.phase is Phase.DRAINING else 7
        record = self.record()
        assert record is not None
        reason = record.ending.reason if record.ending else None
        if code != wanted:
            raise Wrong(f"exit code {code}, not {wanted}: {reason}")
        if record.phase not in ENDED or reason is None:
            raise Wrong(f"ended in phase {record.phase}")
        return {"seen": str(seen), "told": told, "gone": gone, "code": code, "reason": reason}

    def stalled(self) -> bool:
        record = self.record()
        return record is not None and record.stalled_since is not None


def run_case(checkpoint: Path, fault: str, phase: Phase, seed: str) -> dict[str, Any]:
    """Start, break, look; nobody is left afterwards in any case."""
    with tempfile.TemporaryDirectory(prefix="kimi-k3-fault-") as name:
        directory = Path(name)
        with (directory / "serve.log").open("wb") as output:
            supervisor = subprocess.Popen(
                [
                    *(COMMAND, "serve", checkpoint, *TOY, "--tensor-parallel-size", "2"),
                    *("--weights", "int4", "--accept-lossy", "--hang-timeout", str(HANG_SECONDS)),
                    *("--port", str(free_port()), "--state-dir", directory / "state"),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(),
            )
        case = Case(
            fault, phase, supervisor, Family(supervisor.pid), directory / "state", random.Random(seed)
        )
        begun = time.monotonic()
        found: dict[str, Any] = {"fault": fault, "phase": str(phase), "wrong": None}
        try:
            found |= case.run()
        except Wrong as wrong:
            found |= {"wrong": str(wrong), "log": (directory / "serve.log").read_text()[-3000:]}
        finally:
            case.family.look()
            supervisor.kill()
            supervisor.wait()
            case.family.kill()
        return found | {"seconds": round(time.monotonic() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--cases", type=int, default=len(ROUND))
    given = parser.parse_args()
    chooser = random.Random(given.seed)
    chosen: list[tuple[str, Phase]] = []
    while len(chosen) < given.cases:
        chosen += chooser.sample(ROUND, len(ROUND))
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        make_tiny_checkpoint(Path(scratch) / "tiny")
        for number, (fault, phase) in enumerate(chosen[: given.cases]):
            found = run_case(Path(scratch) / "tiny", fault, phase, f"{given.seed}-{number}")
            wrong += found["wrong"] is not None
            print(json.dumps(found), flush=True)
    print(f"seed {given.seed}: {given.cases} faults, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
