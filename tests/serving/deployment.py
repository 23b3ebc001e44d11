# SPDX-License-Identifier: Apache-2.0
"""A real deployment for tests: `kimi-k3 serve` with vLLM as its child, and `kimi-k3 sidecar` beside it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.certificates import Signed
from tests.ports import free_port
from tests.surroundings import SURROUNDINGS

COMMAND = str(Path(sys.executable).with_name("kimi-k3"))
TOY = ("--profile", "cpu-tiny")
"""Of every start here: on a machine with GPUs another one is the default."""
START_SECONDS = 400
"""A start takes 20 to 60 s on two idle cores; a test machine may be busy."""


@dataclass(frozen=True)
class Mode:
    """What a deployment serves, and how it is spread."""

    weights: str = "mxfp4"
    scale_rule: str = "mse"
    ranks: int = 1
    expert_parallel: bool = False

    def __str__(self) -> str:
        spread = f"tp{self.ranks}" + ("-ep" if self.expert_parallel else "")
        return f"{self.reference_weights}-{spread}"

    @property
    def reference_weights(self) -> str:
        """The reference's name for these weights."""
        return self.weights if self.weights == "mxfp4" else f"int4-{self.scale_rule}"

    def arguments(self) -> list[str]:
        arguments = ["--weights", self.weights, "--tensor-parallel-size", str(self.ranks)]
        if self.weights == "int4":
            arguments += ["--accept-lossy", "--scale-rule", self.scale_rule]
        if self.expert_parallel:
            arguments.append("--expert-parallel")
        return arguments


@dataclass(frozen=True)
class Deployment:
    """A deployment that is ready."""

    mode: Mode
    supervisor: subprocess.Popen[bytes]
    engine_url: str
    sidecar_url: str
    state_dir: Path
    log: Path
    api_key: str | None

    def sidecar(self, path: str) -> httpx.Response:
        return httpx.get(self.sidecar_url + path, timeout=30, verify=self.sidecar_url.startswith("http:"))

    def complete(self, prompt: list[int], tokens: int) -> list[int]:
        """Greedy continuation of a prompt of token ids, as token ids."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        body = {
            "model": "kimi-k3",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = httpx.post(f"{self.engine_url}/v1/completions", json=body, headers=headers, timeout=300)
        response.raise_for_status()
        answer: Any = response.json()["choices"][0]["token_ids"]
        return list(answer)


def environment(**more: str) -> dict[str, str]:
    """The environment of a command, without this project's and vLLM's own variables."""
    return SURROUNDINGS | more


class Family:
    """The processes below one, as they were at any look.

    Not by their environment: vLLM names its processes, which overwrites what /proc shows of that.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seen: set[psutil.Process] = set()

    def look(self) -> int:
        """Look once more; returns how many have been seen so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen.update(self._root.children(recursive=True))
        return len(self._seen)

    def left(self) -> list[int]:
        """Pids of those that still run."""
        return [process.pid for process in self._seen if _runs(process)]

    def kill(self) -> None:
        """End those that still run."""
        for process in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def started(
    checkpoint: Path,
    directory: Path,
    mode: Mode,
    *,
    api_key: str | None = None,
    tls: Signed | None = None,
    host: str = "127.0.0.1",
    ports: tuple[int, int] | None = None,
    killed: bool = False,
) -> Iterator[Deployment]:
    """Start, wait until ready, and end by SIGTERM; asserts a clean end with no process left.

    Args:
        tls: what both servers speak TLS with.
        host: where both listen.
        ports: of engine and sidecar.
        killed: the test kills it, so that its end is no clean one.
    """
    state_dir, log = directory / "state", directory / "serve.log"
    engine_port, sidecar_port = ports or (free_port(), free_port())
    keyed = environment(**({"KIMI_K3_API_KEY": api_key} if api_key else {}))
    files: tuple[str | Path, ...] = ()
    named: dict[str, str] = {}
    if tls is not None:
        files = ("--tls-cert-file", tls.certificate, "--tls-key-file", tls.key)
        prefix = "KIMI_K3_SIDECAR_TLS_"
        named = {prefix + "CERT_FILE": str(tls.certificate), prefix + "KEY_FILE": str(tls.key)}
    scheme = "http" if tls is None else "https"
    with log.open("wb") as output, (directory / "sidecar.log").open("wb") as sidecar_output:
        supervisor = subprocess.Popen(
            [
                COMMAND,
                "serve",
                checkpoint,
                *TOY,
                *files,
                "--host",
                host,
                "--port",
                str(engine_port),
                "--state-dir",
                state_dir,
                *mode.arguments(),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=keyed,
        )
        sidecar = subprocess.Popen(
            [COMMAND, "sidecar", "--host", host, "--port", str(sidecar_port), "--state-dir", state_dir],
            stdout=sidecar_output,
            stderr=subprocess.STDOUT,
            env=environment(**named),
        )
    deployment = Deployment(
        mode=mode,
        supervisor=supervisor,
        engine_url=f"{scheme}://127.0.0.1:{engine_port}",
        sidecar_url=f"{scheme}://127.0.0.1:{sidecar_port}",
        state_dir=state_dir,
        log=log,
        api_key=api_key,
    )
    family = Family(supervisor.pid)
    try:
        _wait_until_ready(deployment)
        assert family.look() >= 2 + mode.ranks, "API server, EngineCore and the workers"
        yield deployment
        if killed:
            return
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(60) == 0, log.read_text()[-4000:]
        assert family.left() == []
    finally:
        family.look()
        for process in (supervisor, sidecar):
            process.kill()
            process.wait()
        family.kill()


def _wait_until_ready(deployment: Deployment) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert deployment.supervisor.poll() is None, deployment.log.read_text()[-4000:]
        with contextlib.suppress(httpx.TransportError):
            if deployment.sidecar("/readyz").status_code == httpx.codes.OK:
                return
        time.sleep(0.5)
    raise AssertionError(f"not ready after {START_SECONDS} s:\n{deployment.log.read_text()[-4000:]}")
