# SPDX-License-Identifier: Apache-2.0
"""vLLM's own executor over two nodes, which here are two supervisors and two sidecars on one machine."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ports import free_port
from tests.reference.forward import ReferenceModel
from tests.serving.deployment import (
    COMMAND,
    START_SECONDS,
    TOY,
    Deployment,
    Family,
    Mode,
    environment,
)

TOKEN = "of-both-nodes"
INT4 = Mode(weights="int4")
TOKENS = 40
"""Of the answer that is under way when a node is stopped; two engines on two busy cores make one a second."""

LAYOUTS = {
    "two-stages": ("--set", "pipeline-parallel-size=2"),
    "experts-of-both": ("--set", "data-parallel-size=2", "--expert-parallel"),
}

pytestmark = [
    pytest.mark.engine,
    pytest.mark.parametrize("pair", LAYOUTS, indirect=True, scope="module"),
]


@dataclass(frozen=True)
class Pair:
    """Both nodes, ready; the first one as a deployment."""

    layout: str
    first: Deployment
    second: subprocess.Popen[bytes]
    family: Family
    sidecars: tuple[int, int]

    def ask(self, node: int, path: str) -> Any:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        url = f"http://127.0.0.1:{self.sidecars[node]}{path}"
        return httpx.get(url, headers=headers, timeout=30).json()


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp(request.param)
    api, meeting, *sidecars = (free_port() for _ in range(4))
    secret = environment(KIMI_K3_SIDECAR_TOKEN=TOKEN)
    with contextlib.ExitStack() as stack:

        def run(name: str, *arguments: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((directory / name).open("wb"))
            process = subprocess.Popen([COMMAND, *arguments], env=secret, stdout=log, stderr=log)
            stack.callback(_end, process)
            return process

        nodes = []
        for node, port in enumerate(sidecars):
            state = directory / f"state{node}"
            state.mkdir()
            run(f"sidecar{node}.log", "sidecar", "--port", str(port), "--state-dir", str(state))
            where = ("--node-rank", str(node), "--leader-address", "127.0.0.1", "--leader-port", str(meeting))
            api_or_leader = (
                ("--leader-sidecar", f"http://127.0.0.1:{sidecars[0]}") if node else ("--port", str(api))
            )
            serve = ("serve", str(tiny), *TOY, *INT4.arguments(), "--set", "nodes=2", *LAYOUTS[request.param])
            serve = (*serve, "--drain-timeout", str(START_SECONDS))
            here = ("--state-dir", str(state), *api_or_leader)
            nodes.append(run(f"node{node}.log", *serve, *where, *here))
        first = Deployment(
            mode=INT4,
            supervisor=nodes[0],
            engine_url=f"http://127.0.0.1:{api}",
            sidecar_url=f"http://127.0.0.1:{sidecars[0]}",
            state_dir=directory / "state0",
            log=directory / "node0.log",
            api_key=None,
        )
        family = Family(nodes[0].pid)
        _wait(first, nodes, directory)
        family.look()
        yield Pair(request.param, first, nodes[1], family, (sidecars[0], sidecars[1]))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(first: Deployment, nodes: list[subprocess.Popen[bytes]], directory: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and all(node.poll() is None for node in nodes):
        with contextlib.suppress(httpx.TransportError):
            if first.sidecar("/readyz").status_code == 200:
                return
        time.sleep(0.5)
    pytest.fail("\n".join(path.read_text()[-4000:] for path in sorted(directory.glob("node*.log"))))


@pytest.mark.parametrize("length", [20, 300])
def test_greedy_tokens_equal_the_reference(pair: Pair, tiny: Path, length: int) -> None:
    """Cut into stages, or with the experts on both nodes: the same model, token for token."""
    prompt = random.Random(length).choices(range(256), k=length)
    served = pair.first.complete(prompt, 32)
    model = ReferenceModel.load(tiny, weights="int4-mse")
    assert served == model.greedy(prompt, 32, draft=served)
    assert len(set(served)) > 8


def test_the_first_nodes_sidecar_tells_of_every_rank(pair: Pair) -> None:
    """What was converted where, and its loss, is whole; and the header says so on every answer."""
    conversion = pair.ask(0, "/conversion")
    assert conversion["progress"]["fraction"] == 1.0
    assert conversion["missing"] == []
    assert [rank["rank"] for rank in pair.ask(0, "/status")["ranks"]] == [0, 1]
    assert [rank["rank"] for rank in pair.ask(1, "/status")["ranks"]] == [1]
    answer = httpx.get(f"{pair.first.engine_url}/v1/models", timeout=30)
    assert f"rel_mse={conversion['total']['relative_mse']:.3g}" in answer.headers["x-kimi-k3-weights"]


def test_stopping_one_node_stops_both(pair: Pair) -> None:
    """A drained node takes the deployment with it, but not the request that is being answered.

    Of two engines one has no request then: vLLM would end it, although the other computes with its experts.
    """
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(len(pair.first.complete([1, 2, 3], TOKENS))))
    asking.start()
    deadline = time.monotonic() + START_SECONDS
    metrics = f"{pair.first.engine_url}/metrics"
    while not re.search(r"^vllm:num_requests_running\{.*\} 1", httpx.get(metrics).text, re.MULTILINE):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    asked = pair.second if pair.layout == "two-stages" else pair.first.supervisor
    asked.send_signal(signal.SIGTERM)
    asking.join()
    assert answers == [TOKENS]
    assert pair.first.supervisor.wait(90) == 0
    assert pair.second.wait(90) == 0
    assert "by force" not in pair.first.log.read_text()
    assert pair.family.left() == []
