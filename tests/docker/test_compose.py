# SPDX-License-Identifier: Apache-2.0
"""The CPU's profile from `up` to an answer and to nothing left, and through what goes wrong meanwhile."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.docker.engine import ROOT, Docker
from tests.ports import free_port

pytestmark = pytest.mark.engine

START_SECONDS = 300.0
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Running:
    """A composed deployment, and where it is published."""

    docker: Docker
    ports: dict[str, int]

    def get(self, service: str, path: str) -> httpx.Response:
        """An answer of a service's published port."""
        return httpx.get(f"http://127.0.0.1:{self.ports[service]}{path}", trust_env=False, timeout=30)

    def sidecar(self, path: str) -> Any:
        """What the sidecar answers."""
        return self.get("sidecar", path).json()

    def ready(self) -> bool:
        """Whether the sidecar says that traffic may come."""
        with contextlib.suppress(httpx.TransportError):
            return self.get("sidecar", "/readyz").status_code == 200
        return False

    def container(self, service: str) -> dict[str, Any]:
        """What the engine knows of a service's container."""
        number = self.docker.compose("--profile", "cpu", "ps", "--all", "--quiet", service).strip()
        found: dict[str, Any] = json.loads(self.docker.run("inspect", number).stdout)[0]
        return found

    def chat(self) -> str:
        """The answer to the question of docs/docker.md."""
        body = re.search(r"^  -d '(.+)'$", (ROOT / "docs/docker.md").read_text(), re.M)
        assert body
        url = f"http://127.0.0.1:{self.ports['engine']}/v1/chat/completions"
        answer = httpx.post(url, content=body[1], headers=JSON, trust_env=False, timeout=120)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text


def wait_until(holds: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.3)


@pytest.fixture(scope="module")
def composed(images: Docker) -> Iterator[Running]:
    """`docker compose --profile cpu up`, and after the tests `down`, which must leave nothing."""
    ports = {name: free_port() for name in ("engine", "sidecar", "prometheus")}
    published = {
        "KIMI_K3_PORT": str(ports["engine"]),
        "KIMI_K3_SIDECAR_PORT": str(ports["sidecar"]),
        "KIMI_K3_PROMETHEUS_PORT": str(ports["prometheus"]),
        "KIMI_K3_WEIGHTS": "int4",
        "KIMI_K3_ACCEPT_LOSSY": "1",
    }
    docker = Docker({**images.variables, **published}, images.checkout, "kimi-k3-test")
    try:
        docker.compose("--profile", "cpu", "up", "--wait", "--detach")
        yield Running(docker, ports)
    except BaseException:
        print(docker.compose("--profile", "cpu", "logs", "--tail", "100", check=False))
        raise
    finally:
        docker.compose("--profile", "cpu", "down", "--volumes", check=False)


def test_answers(composed: Running) -> None:
    """Published on this machine: the API, the sidecar, Prometheus, which has scraped both."""
    assert composed.chat().endswith("#### 14")
    assert composed.ready()
    assert composed.sidecar("/status")["weights"]["lossy"] is True
    assert "Kimi" in composed.get("sidecar", "/").text

    def up() -> dict[str, str]:
        answer = composed.get("prometheus", "/api/v1/targets").json()
        return {one["labels"]["job"]: one["health"] for one in answer["data"]["activeTargets"]}

    wait_until(lambda: set(up().values()) == {"up"}, "targets up", 60)
    assert set(up()) == {"kimi-k3-engine", "kimi-k3-sidecar"}
    rules = composed.get("prometheus", "/api/v1/rules").json()["data"]["groups"]
    assert rules
    assert {rule["health"] for group in rules for rule in group["rules"]} <= {"ok", "unknown"}


def test_acknowledgement(composed: Running) -> None:
    """The sidecar may write what it keeps, beside the engine's files, as another process of the same user."""
    url = f"http://127.0.0.1:{composed.ports['sidecar']}/warnings/lossy-weights/acknowledgement"
    answer = httpx.post(url, json={"by": "Ada"}, trust_env=False)
    assert answer.status_code == 200, answer.text


def test_confined(composed: Running) -> None:
    """As it runs, not only as it is written: no root, no capability, nothing to write but volumes."""
    for service in ("engine", "sidecar"):
        status = composed.docker.compose("--profile", "cpu", "exec", "-T", service, "cat", "/proc/1/status")
        told = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert told["Uid"].split()[0] == "10001"
        assert int(told["CapEff"], 16) == int(told["CapBnd"], 16) == 0
        assert told["NoNewPrivs"] == "1"
        refused = composed.docker.compose(
            "--profile", "cpu", "exec", "-T", service, "touch", "/opt/kimi-k3/x", check=False
        )
        assert "Read-only file system" in refused


def runbook() -> tuple[str, list[str]]:
    """What the runbook defines for Compose, and its commands but those of AMD's programs."""
    first, *blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/runbook.md").read_text(), re.DOTALL)
    defined = first.split("# Compose", 1)[1].split("\n", 1)[1].replace("mi325x", "cpu")
    lines = {line for block in blocks for line in block.splitlines()}
    known = re.compile(r"events|logs (sidecar|engine)|on (sidecar|engine) (?!amd-smi|cat /proc)")
    return defined, sorted(filter(known.match, lines))


@pytest.mark.parametrize("line", runbook()[1])
def test_the_runbooks_commands(composed: Running, line: str) -> None:
    """Whoever is on call at night types what stands there, and it must work as it stands."""
    told = line.replace("/models/Kimi-K3", "/opt/kimi-k3/miniature")
    done = subprocess.run(
        ["bash", "-euc", f"{runbook()[0]}\n{told}"],
        cwd=composed.docker.checkout,
        env={**composed.docker.variables, "COMPOSE_PROJECT_NAME": composed.docker.project},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_a_killed_engine_comes_back(composed: Running) -> None:
    """kill -9 of the engine's core: the supervisor ends with its reason, and Docker starts it anew."""
    before = composed.container("engine")["RestartCount"]
    # In two parts, or it would find itself.
    kill = (
        "import os, pathlib, signal; [os.kill(int(p.parent.name), signal.SIGKILL) for p in "
        "pathlib.Path('/proc').glob('[0-9]*/cmdline') if b'::Engine' b'Core' in p.read_bytes()]"
    )
    composed.docker.compose("--profile", "cpu", "exec", "-T", "engine", "python", "-c", kill)
    wait_until(lambda: not composed.ready(), "not ready", 10)
    wait_until(lambda: composed.container("engine")["RestartCount"] > before, "a restart", 60)
    wait_until(composed.ready, "ready again")
    assert composed.chat().endswith("#### 14")


def test_restart_in_the_middle_of_a_start(composed: Running) -> None:
    """What the interrupted start left behind is cleared away, and the next one becomes ready."""
    composed.docker.compose("--profile", "cpu", "restart", "engine")
    first = composed.sidecar("/status")["deployment"]["start_id"]

    def converting() -> bool:
        status = composed.sidecar("/startupz")
        return status["phase"] in ("converting", "compiling", "capturing", "warming", "ready")

    wait_until(converting, "converting")
    composed.docker.compose("--profile", "cpu", "restart", "engine")
    wait_until(lambda: composed.sidecar("/status")["deployment"]["start_id"] != first, "another start")
    wait_until(composed.ready, "ready")
    assert composed.chat().endswith("#### 14")


def test_down_leaves_nothing(composed: Running) -> None:
    """The last one of this file: containers, networks and, with --volumes, volumes are gone."""
    composed.docker.compose("--profile", "cpu", "down", "--volumes")
    label = "label=com.docker.compose.project=kimi-k3-test"
    for kind in ("container", "network", "volume"):
        everything = ["--all"] if kind == "container" else []
        assert composed.docker.run(kind, "ls", "--quiet", *everything, "--filter", label).stdout == ""
