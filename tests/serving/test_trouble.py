# SPDX-License-Identifier: Apache-2.0
"""What a real start does when something is wrong with its surroundings or its checkpoint."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from safetensors import safe_open

from kimi_k3.journal.models import SUPERVISOR_FILE
from tests.ports import free_port
from tests.serving.deployment import (
    COMMAND,
    START_SECONDS,
    TOY,
    Family,
    Mode,
    environment,
    started,
)

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Run:
    """`kimi-k3 serve` without a sidecar."""

    supervisor: subprocess.Popen[bytes]
    url: str
    log: Path
    family: Family

    def wait_for(self, text: str) -> None:
        """Until the output holds ``text``."""
        self._wait(lambda: text in self.log.read_text(), alive=True)

    def wait(self) -> int:
        """Until it ends; returns the exit code."""
        self._wait(lambda: self.supervisor.poll() is not None, alive=False)
        return self.supervisor.wait()

    def _wait(self, done: Callable[[], bool], *, alive: bool) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not done():
            self.family.look()
            assert not alive or self.supervisor.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.2)


@contextlib.contextmanager
def _serving(checkpoint: Path, state_dir: Path, log: Path, *more: str) -> Iterator[Run]:
    """Start it; it and everything of it is killed at the end."""
    port = free_port()
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            [COMMAND, "serve", checkpoint, *TOY, "--port", str(port), "--state-dir", state_dir, *more],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    run = Run(supervisor, f"http://127.0.0.1:{port}", log, Family(supervisor.pid))
    try:
        yield run
    finally:
        run.family.look()
        supervisor.kill()
        supervisor.wait()
        run.family.kill()


def test_a_state_directory_that_breaks_is_reported_once_and_serving_goes_on(
    tiny: Path, tmp_path: Path
) -> None:
    """After an hour of loading, a full disk under the journal must not be what ends the start."""
    state_dir, log = tmp_path / "state", tmp_path / "serve.log"
    with _serving(tiny, state_dir, log, "--weights", "int4", "--accept-lossy") as run:
        run.wait_for("loading: ")
        # Tests run as root, whom no permission stops: a file in its place refuses every write.
        state_dir.rename(tmp_path / "gone")
        state_dir.touch()
        run.wait_for("kimi-k3: ready: serving")
        body = {"model": "kimi-k3", "prompt": "Hello", "max_tokens": 8}
        assert httpx.post(f"{run.url}/v1/completions", json=body, timeout=60).status_code == httpx.codes.OK
        lines = log.read_text().splitlines()
        for file in (SUPERVISOR_FILE, "rank-0000.json"):
            assert sum(f"cannot write {file}" in line for line in lines) == 1, file
        run.supervisor.terminate()
        assert run.wait() == 0
        assert run.family.look() >= 3
        assert run.family.left() == []


def test_a_damaged_scale_stops_the_conversion_and_names_itself(tiny: Path, tmp_path: Path) -> None:
    """int4 that cannot be done is an error of one line, not a model that answers nonsense."""
    checkpoint, state_dir, log = tmp_path / "damaged", tmp_path / "state", tmp_path / "serve.log"
    shutil.copytree(tiny, checkpoint)
    name = "language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight_scale"
    _overwrite_first_byte(checkpoint, name, 255)
    with _serving(checkpoint, state_dir, log, "--weights", "int4", "--accept-lossy") as run:
        assert run.wait() == 7
        assert run.family.look() >= 3
        assert run.family.left() == []
    last = log.read_text().splitlines()[-1]
    assert last.startswith("kimi-k3: error: vLLM failed in phase ")
    assert "layer 2, w2, rank 0: expert 3, row 0, group 0 is NaN (E8M0 scale 255)" in last
    assert "--weights mxfp4" in last


def _overwrite_first_byte(checkpoint: Path, name: str, value: int) -> None:
    for shard in checkpoint.glob("*.safetensors"):
        with safe_open(shard, "np") as tensors:
            if name not in tensors.keys():  # noqa: SIM118
                continue
            start = tensors.get_tensor(name).tobytes()
        data = bytearray(shard.read_bytes())
        assert data.count(start) == 1
        data[data.index(start)] = value
        shard.write_bytes(data)
        return
    raise AssertionError(f"no tensor {name}")


def test_one_start_at_a_time_and_a_killed_one_makes_room(tiny: Path, tmp_path: Path) -> None:
    """Two engines on one journal would contradict each other; a killed supervisor must not block for ever."""
    state_dir, log = tmp_path / "state", tmp_path / "first.log"
    with _serving(tiny, state_dir, log) as run:
        first = run.supervisor
        run.wait_for("converting: ")
        second = subprocess.run(
            [COMMAND, "serve", tiny, *TOY, "--port", str(free_port()), "--state-dir", state_dir],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=60,
            check=False,
        )
        assert second.returncode == 5
        assert f"pid {first.pid}" in second.stderr
        assert len(second.stderr.splitlines()) == 1
        first.send_signal(signal.SIGKILL)
        first.wait()
        with started(tiny, tmp_path, Mode()) as deployment:
            assert len(deployment.complete([1, 2, 3], 4)) == 4
            assert run.family.look() >= 3
            assert run.family.left() == []
