# SPDX-License-Identifier: Apache-2.0
"""A start with the fake engine, as a process of its own, and the look at what it leaves behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kimi_k3.checkpoint import make_tiny_checkpoint
from kimi_k3.journal.models import SupervisorRecord
from kimi_k3.journal.reader import read_journal
from kimi_k3.words.phases import Phase
from tests.ports import free_port
from tests.surroundings import SURROUNDINGS

DRIVE = Path(__file__).with_name("drive.py")
PATIENCE = 90.0


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_tiny_checkpoint(directory)
    return directory


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@dataclass
class Running:
    """A supervisor that was started."""

    process: subprocess.Popen[str]
    state_dir: Path
    port: int

    def record(self) -> SupervisorRecord | None:
        return read_journal(self.state_dir).supervisor

    def wait_for(self, phase: Phase) -> SupervisorRecord:
        """The record in which this start is in ``phase``."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            record = self.record()
            if record is not None and record.pid == self.process.pid and record.phase is phase:
                return record
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.process.kill()
        pytest.fail(f"never {phase}:\n{self.process.communicate()}")

    def finish(self) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        self.process.send_signal(number)
        return self.finish()


Starter = Callable[..., Running]


@pytest.fixture
def start(checkpoint: Path, state_dir: Path) -> Iterator[Starter]:
    """Starts ``kimi-k3 serve``; whatever still runs afterwards is killed."""
    started: list[Running] = []

    def starter(
        behaviours: str = "good",
        *arguments: str,
        environment: dict[str, str] | None = None,
        path: Path = checkpoint,
        port: int | None = None,
    ) -> Running:
        port = free_port() if port is None else port
        command = [sys.executable, str(DRIVE), behaviours, "serve", str(path)]
        command += ["--profile", "cpu-tiny", "--state-dir", str(state_dir), "--port", str(port), *arguments]
        process = subprocess.Popen(
            command,
            env={**SURROUNDINGS, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Running(process, state_dir, port))
        return started[-1]

    yield starter
    for running in started:
        running.process.kill()
        running.process.communicate()
    for pid in processes_in(state_dir):
        os.kill(pid, signal.SIGKILL)


def processes_in(state_dir: Path) -> list[int]:
    """Living processes that carry this state directory in their environment."""
    mark = f"KIMI_K3_STATE_DIR={state_dir}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def assert_nothing_left(state_dir: Path) -> None:
    """No process, no held lock, no temporary file."""
    assert processes_in(state_dir) == []
    if not state_dir.exists():
        return
    with (state_dir / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert [path.name for path in state_dir.iterdir() if path.name.startswith(".")] == []
