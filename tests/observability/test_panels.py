# SPDX-License-Identifier: Apache-2.0
"""Every query of every panel has data in the phase that it is for, asked of a real Prometheus.

Five sources, each a release: a real vLLM on the CPU through a whole start, some requests and its death; the
recorded start of 96 layers on 8 ranks (made, not measured), once to its end and once failing; a real vLLM
with another model, for what it does not do with Kimi-K3 on a CPU (``llama.py``); and AMD's exporter, an
exposition made from the names in its source (version 1.5.1), since no AMD GPU was at hand.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from dashboards.__main__ import DIRECTORY

from kimi_k3.checkpoint import make_tiny_checkpoint
from kimi_k3.host import Places
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.settings import Settings
from kimi_k3.words.phases import Phase
from tests.observability.expressions import VALUES, panels, substituted
from tests.observability.known import exporter
from tests.observability.llama import NAME as LLAMA
from tests.observability.llama import llama
from tests.observability.prometheus import PROGRAM, Exporter, Prometheus, Target, prometheus
from tests.observability.slowly import slow_loading
from tests.ports import free_port
from tests.replay.player import Then, play
from tests.replay.recording import Recording
from tests.serving.deployment import Deployment, Mode, started
from tests.sidecar.engine import fake_engine
from tests.sidecar.serving import serving, wait_until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(PROGRAM is None, reason="no prometheus on this machine; run scripts/programs"),
]

ENGINE, REPLAY, FAILED, ANOTHER = "engine", "replay", "failed", "another"
LOADING, CONVERTING, READY = Phase.LOADING, Phase.CONVERTING, Phase.READY
PREFIX = "amd_"
"""That the exporter was told to put before its names."""

START: dict[str, tuple[Phase, ...]] = {
    "Phase": (LOADING, READY),
    "Ready": (READY,),
    "In this phase for": (LOADING, READY),
    "Left of this phase": (LOADING,),
    "Left of the start's budget": (LOADING,),
    "Ranks": (LOADING,),
    "Critical warnings": (LOADING,),
    "Phases": (LOADING,),
    "How long each phase took": (READY,),
    "Read of the checkpoint": (CONVERTING,),
    "Converted": (LOADING, READY),
    "Memory of ranks, and the plan": (CONVERTING,),
    "Loss by layer: w13": (READY,),
    "Loss by layer: w2": (READY,),
    "Loss of the model": (READY,),
    "Warnings": (READY,),
    "Progress of the phase": (LOADING,),
    "Not heard for": (CONVERTING,),
    "Nodes": (LOADING,),
    "Ended with": (Phase.FAILED,),
    "Failures reported": (LOADING,),
    "Stalled": (READY,),
    "First completion took": (READY,),
    "Kernels": (CONVERTING,),
}
"""Of *Start*: the phases in which there must be data. With the recorded start in all of them."""

OF_ANOTHER_MODEL = (
    "Found in the prefix cache",
    "Accepted of the draft",
    "Accepted tokens of a draft",
    "Drafted tokens",
)
"""Panels of *Serving* that Kimi-K3 in miniature leaves empty on a CPU (``llama.py`` says why)."""


@dataclass(frozen=True)
class Seen:
    """A Prometheus that has seen all of it, until ``end``; times are seconds since 1970."""

    prometheus: Prometheus
    begin: float
    end: float

    def samples(self, query: str, begin: float, end: float) -> list[tuple[float, float]]:
        """Time and value of what a query gives, second by second, but for NaN."""
        found = self.prometheus.get(
            "/api/v1/query_range", query=query, start=str(begin), end=str(end), step="1"
        )["result"]
        return [
            (at, float(value))
            for series in found
            for at, value in series["values"]
            if not math.isnan(float(value))
        ]

    def during(self, release: str, phase: Phase) -> tuple[float, float]:
        """The first and the last second in which a release said that it is in a phase."""
        query = f'kimi_k3_phase{{release="{release}", kimi_k3_phase="{phase}"}} == 1'
        times = [at for at, _ in self.samples(query, self.begin, self.end)]
        assert times, f"{release} was never seen in phase {phase}"
        return min(times), max(times)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Prometheus scrapes while everything happens, and keeps running."""
    directory = tmp_path_factory.mktemp("panels")
    for name in ("prometheus", ENGINE):
        (directory / name).mkdir()
    tiny = directory / "tiny"
    make_tiny_checkpoint(tiny)
    ports = free_port(), free_port()
    begin = time.time()
    with contextlib.ExitStack() as stack:
        another = stack.enter_context(llama(directory / ANOTHER))
        targets: list[Target | Exporter] = [
            Target(ENGINE, f"http://127.0.0.1:{ports[0]}"),
            Target(ENGINE, f"http://127.0.0.1:{ports[1]}", "-sidecar"),
            replayed(stack, directory, REPLAY, Then.KEEP),
            replayed(stack, directory, FAILED, Then.FAIL),
            Exporter(stack.enter_context(exposed(exposition(PREFIX)))),
            Target(ANOTHER, another.url),
        ]
        running = stack.enter_context(prometheus(directory / "prometheus", targets))
        stack.enter_context(slow_loading(directory / ENGINE / "state"))
        mode = Mode(weights="int4")
        with started(tiny, directory / ENGINE, mode, ports=ports, killed=True) as deployment:
            wait_until(lambda: bool(running.values(f'kimi_k3_ready{{release="{ENGINE}"}} == 1')), seconds=60)
            asked = 'vllm:prompt_tokens_total{release="engine"}'
            wait_until(lambda: bool(running.values(asked)), seconds=60)
            serve_some(deployment)
            counted = f"{asked} > 100"
            wait_until(lambda: bool(running.values(counted)), seconds=60)
            another.wait()
            drafted = "vllm:spec_decode_num_drafts_total"
            wait_until(lambda: bool(running.values(drafted)), seconds=60)
            another.ask()
            wait_until(lambda: bool(running.values(f"{drafted} > 0")), seconds=60)

            def reach(release: str, phase: Phase) -> None:
                query = f'kimi_k3_phase{{release="{release}", kimi_k3_phase="{phase}"}} == 1'
                wait_until(lambda: bool(running.values(query)), seconds=120)

            reach(REPLAY, READY)
            reach(FAILED, Phase.FAILED)
            # A rate needs two scrapes that differ, and the last ones must be in.
            time.sleep(5)
            (core,) = (
                process
                for process in psutil.Process(deployment.supervisor.pid).children(recursive=True)
                if process.name().startswith("VLLM::EngineCor")
            )
            core.kill()
            reach(ENGINE, Phase.FAILED)
            # Tests look at every second, and it has been seen for less than one.
            time.sleep(2)
            yield Seen(running, begin, time.time())


def replayed(stack: contextlib.ExitStack, directory: Path, release: str, then: Then) -> Target:
    """The recorded start, forty times as fast, with a sidecar over its state."""
    state = directory / release
    state.mkdir()
    engine, stop = stack.enter_context(fake_engine()), threading.Event()
    engine.mood = "dead"

    def entered(phase: Phase) -> None:
        engine.mood = "ok" if phase.position >= Phase.WARMING.position else "dead"

    recording = Recording.load()
    run = partial(play, speed=40.0, then=then, engine_url=engine.url, entered=entered)
    thread = threading.Thread(target=run, args=(recording, state, stop))
    thread.start()
    stack.callback(thread.join)
    stack.callback(stop.set)
    app = create_app(Settings(state_dir=state), places=limited(directory / f"{release}-machine"))
    return Target(release, stack.enter_context(serving(app)), "-sidecar")


def limited(directory: Path) -> Places:
    """This machine, with a control group that has a limit: that of the tests may have none."""
    places = Places(proc=directory / "proc", cgroup=directory / "cgroup")
    files = {
        places.proc / "self/cgroup": "0::/pod\n",
        places.proc / "meminfo": Path("/proc/meminfo").read_text(),
        places.cgroup / "pod/memory.max": f"{512 * 2**30}\n",
        places.cgroup / "pod/memory.current": f"{400 * 2**30}\n",
        places.cgroup / "pod/memory.stat": f"anon {2**30}\nfile {2**30}\nshmem {2**30}\n",
        places.cgroup / "pod/memory.events": "oom_kill 0\n",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return places


def serve_some(deployment: Deployment) -> None:
    """Requests, more at a time than are computed at once, and one that is refused."""
    url = deployment.engine_url
    chat = {"model": "kimi-k3", "messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 8}
    with ThreadPoolExecutor(12) as asking:
        for _ in asking.map(lambda _: deployment.complete(list(range(40)), 24), range(24)):
            pass
    httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).raise_for_status()
    assert httpx.post(f"{url}/v1/chat/completions", json={"model": "another"}, timeout=60).status_code >= 400


@contextlib.contextmanager
def exposed(text: str) -> Iterator[str]:
    """A server that tells this at every path."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def exposition(prefix: str) -> str:
    """What AMD's exporter tells of eight GPUs: each of its series by name, with a value that shows."""
    lines = []
    for family in exporter():
        lines.append(f"# TYPE {prefix}{family.name} gauge")
        for gpu in range(8):
            labels = dict.fromkeys(sorted(family.labels or ()), "x")
            labels |= {"gpu_id": str(gpu), "hostname": "node-a", "namespace": "models", "pod": "k3-0"}
            written = ",".join(f"{label}={json.dumps(value)}" for label, value in labels.items())
            lines.append(f"{prefix}{family.name}{{{written}}} {1 + gpu}")
    return "\n".join(lines) + "\n"


def of_board(name: str) -> list[dict[str, Any]]:
    return panels(json.loads((DIRECTORY / f"{name}.json").read_text()))


def titles(name: str) -> list[str]:
    return [panel["title"] for panel in of_board(name)]


def require_data(seen: Seen, panel: dict[str, Any], begin: float, end: float, **chosen: str) -> None:
    """Each query of a panel gives a number at some second between two, with these values of variables."""
    values = VALUES | {"__rate_interval": "5s"} | chosen
    for target in panel["targets"]:
        query = substituted(target["expr"], values)
        assert seen.samples(query, begin, end), f"{panel['title']}: nothing from {query}"


def test_the_table_is_of_the_dashboard() -> None:
    """A panel that nobody has seen with data may never have any."""
    assert sorted(START) == sorted(titles("start"))


@pytest.mark.parametrize("panel", of_board("start"), ids=lambda panel: panel["title"])
@pytest.mark.parametrize("release", [REPLAY, ENGINE])
def test_start(seen: Seen, panel: dict[str, Any], release: str) -> None:
    """In each phase that it is for, at real scale and with the real engine."""
    for phase in START[panel["title"]]:
        source = FAILED if release == REPLAY and phase is Phase.FAILED else release
        # What a toy does within a second was not seen then; it stays to be seen.
        begin, end = seen.during(source, READY if source == ENGINE and phase is CONVERTING else phase)
        require_data(seen, panel, begin, end, release=source)


@pytest.mark.parametrize("panel", of_board("serving"), ids=lambda panel: panel["title"])
def test_serving(seen: Seen, panel: dict[str, Any]) -> None:
    """Once the real vLLM serves, each from the model that it can serve so on a CPU."""
    of_another = panel["title"] in OF_ANOTHER_MODEL
    release, model = (ANOTHER, LLAMA) if of_another else (ENGINE, "kimi-k3")
    require_data(seen, panel, *seen.during(ENGINE, READY), release=release, model_name=model)


def test_what_is_of_another_model_is_of_the_dashboard() -> None:
    """A panel that was renamed would be asked of the engine, and stay empty for another reason."""
    assert set(OF_ANOTHER_MODEL) <= set(titles("serving"))


@pytest.mark.parametrize("panel", of_board("node"), ids=lambda panel: panel["title"])
def test_node(seen: Seen, panel: dict[str, Any]) -> None:
    """With the prefix that the exporter was given; the machine's memory from the sidecars."""
    require_data(seen, panel, seen.begin, seen.end, prefix=PREFIX)


@pytest.mark.parametrize("panel", of_board("fleet"), ids=lambda panel: panel["title"])
def test_fleet(seen: Seen, panel: dict[str, Any]) -> None:
    """While one release serves, another one has failed and a third one is ready."""
    require_data(seen, panel, *seen.during(ENGINE, READY))
