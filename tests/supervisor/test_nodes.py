# SPDX-License-Identifier: Apache-2.0
"""Two nodes of one deployment on this machine: two supervisors, two sidecars, and the fake engine on both."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kimi_k3.errors import ExitCode
from kimi_k3.journal.models import Ending
from kimi_k3.words.phases import Phase
from tests.ports import free_port
from tests.supervisor.conftest import (
    DRIVE,
    PATIENCE,
    Running,
    assert_nothing_left,
    processes_in,
)
from tests.surroundings import SURROUNDINGS

TOKEN = "of-both-nodes"
SIZES = ("--set", "nodes=2", "--set", "pipeline-parallel-size=2", "--weights", "int4", "--accept-lossy")


@dataclass
class Nodes:
    """Starts nodes of a deployment, each with its state directory and its sidecar."""

    checkpoint: Path
    directory: Path
    sidecars: dict[int, int] = field(default_factory=lambda: {0: free_port(), 1: free_port()})
    meeting: int = field(default_factory=free_port)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def state_dir(self, node: int) -> Path:
        return self.directory / f"node{node}"

    def sidecar(self, node: int, *, token: str | None = TOKEN) -> None:
        self.state_dir(node).mkdir(exist_ok=True)
        environment = SURROUNDINGS | ({} if token is None else {"KIMI_K3_SIDECAR_TOKEN": token})
        command = [sys.executable, "-m", "kimi_k3", "sidecar", "--port", str(self.sidecars[node])]
        command += ["--state-dir", str(self.state_dir(node))]
        self.started.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
            )
        )
        eventually(lambda: self.ask(node, "/livez", token=None).status_code == 200)

    def serve(
        self,
        node: int,
        behaviours: str = "good",
        *arguments: str,
        token: str | None = TOKEN,
        port: int | None = None,
    ) -> Running:
        port = free_port() if port is None else port
        command = [sys.executable, str(DRIVE), behaviours, "serve", str(self.checkpoint)]
        command += ["--profile", "cpu-tiny", *SIZES, "--state-dir", str(self.state_dir(node))]
        command += ["--node-rank", str(node), "--leader-address", "127.0.0.1"]
        command += ["--leader-port", str(self.meeting)]
        command += ["--port", str(port), "--readiness-delay", "0.5", *arguments]
        if node:
            command += ["--leader-sidecar", f"http://127.0.0.1:{self.sidecars[0]}"]
        environment = {} if token is None else {"KIMI_K3_SIDECAR_TOKEN": token}
        process = subprocess.Popen(
            command,
            env=SURROUNDINGS | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return Running(process, self.state_dir(node), port)

    def both(self, first: str = "good", second: str = "good", *arguments: str) -> tuple[Running, Running]:
        self.sidecar(0)
        self.sidecar(1)
        return self.serve(0, first, *arguments), self.serve(1, second, *arguments)

    def serving(self, *arguments: str) -> tuple[Running, Running]:
        running = self.both("good", "good", *arguments)
        for each in running:
            each.wait_for(Phase.READY)
        eventually(lambda: self.ask(0, "/readyz").status_code == 200)
        return running

    def ask(self, node: int, path: str, *, token: str | None = TOKEN) -> httpx.Response:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            return httpx.get(f"http://127.0.0.1:{self.sidecars[node]}{path}", headers=headers)
        except httpx.ConnectError:
            return httpx.Response(599)

    def reasons(self) -> set[str]:
        return {reason["code"] for reason in self.ask(0, "/readyz").json()["reasons"]}


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def nodes(checkpoint: Path, tmp_path: Path) -> Iterator[Nodes]:
    found = Nodes(checkpoint, tmp_path)
    yield found
    for process in found.started:
        process.kill()
        process.communicate()
    for node in found.sidecars:
        for pid in processes_in(found.state_dir(node)):
            os.kill(pid, signal.SIGKILL)


def ending(running: Running) -> Ending:
    record = running.record()
    assert record is not None
    assert record.ending is not None
    return record.ending


def test_the_first_node_speaks_for_all(nodes: Nodes) -> None:
    """The first node's sidecar tells of all ranks; the other's of its own, and it is ready, too."""
    nodes.serving()
    eventually(lambda: nodes.ask(1, "/readyz").status_code == 200)
    eventually(lambda: nodes.ask(0, "/status").json()["nodes"][0]["phase"] == "ready")
    status: dict[str, Any] = nodes.ask(0, "/status").json()
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
    assert [(node["node"], node["fresh"]) for node in status["nodes"]] == [(1, True)]
    assert (status["deployment"]["nodes"], status["deployment"]["world_size"]) == (2, 2)
    conversion = nodes.ask(0, "/conversion").json()
    assert conversion["progress"]["fraction"] == 1.0
    assert conversion["missing"] == []
    other = nodes.ask(1, "/status").json()
    assert [rank["rank"] for rank in other["ranks"]] == [1]
    assert (other["engine"]["url"], other["deployment"]["node"]) == (None, 1)
    assert nodes.ask(1, "/warnings").json()["warnings"][0]["code"] == "lossy-weights"


def test_a_series_of_a_rank_is_there_once(nodes: Nodes) -> None:
    """A sum over both nodes' scrapes counts no rank twice."""
    nodes.serving()
    first, other = (nodes.ask(node, "/metrics").text for node in (0, 1))
    assert 'kimi_k3_conversion_projections{rank="1"}' in first
    assert "kimi_k3_nodes 2.0" in first
    assert 'rank="' not in other
    assert "kimi_k3_conversion" not in other
    assert 'node="1"' in other
    eventually(lambda: "kimi_k3_ready 1.0" in nodes.ask(1, "/metrics").text)


@pytest.mark.parametrize("asked", [0, 1])
def test_all_nodes_stop_together(nodes: Nodes, asked: int) -> None:
    """Whichever is asked to stop: the first one drains, and the other computes for it until it has."""
    running = nodes.serving()
    running[asked].process.send_signal(signal.SIGTERM)
    eventually(lambda: nodes.ask(0, "/readyz").status_code == 503)
    for each in running:
        code, out, err = each.finish()
        assert code == 0, (out, err)
        assert ending(each).exit_code == 0
        assert_nothing_left(each.state_dir)
    assert ending(running[0]).at <= ending(running[1]).at


def test_an_engine_that_goes_with_the_first_node(nodes: Nodes) -> None:
    """The first node's end breaks the other's engine, perhaps before that was told; nothing has failed."""
    first, second = nodes.serving()
    record = second.record()
    assert record is not None
    assert record.engine_pid is not None
    first.process.send_signal(signal.SIGTERM)
    eventually(lambda: (seen := first.record()) is not None and seen.phase is not Phase.READY)
    os.kill(record.engine_pid, signal.SIGKILL)
    for each in (first, second):
        code, out, err = each.finish()
        assert code == 0, (out, err)


def test_a_node_that_waits_for_the_first_one(nodes: Nodes) -> None:
    """Nobody knows which pod is scheduled first; it says for whom it waits, and can be stopped meanwhile."""
    nodes.sidecar(1)
    second = nodes.serve(1)
    assert second.process.stderr is not None
    lines = iter(second.process.stderr.readline, "")
    assert any("waiting for the first node's sidecar" in line for line in lines)
    nodes.sidecar(0)
    first = nodes.serve(0)
    second.wait_for(Phase.READY)
    first.wait_for(Phase.READY)


def test_a_node_stopped_while_it_waits(nodes: Nodes) -> None:
    """It has started nothing yet."""
    nodes.sidecar(1)
    second = nodes.serve(1)
    second.wait_for(Phase.PREFLIGHT)
    code, _, _ = second.stop()
    assert code == 128 + signal.SIGTERM
    assert_nothing_left(second.state_dir)


@pytest.mark.parametrize(
    ("behaviours", "reason"),
    [
        (("good", "dies-loading"), "node 1 failed"),
        (("dies-after-others", "good"), "the first node failed"),
        (("good", "no-ranks"), "no report of rank 1"),
        (("good", "missing-conversion"), "rank 1 did not convert"),
        (("good", "serves-mxfp4"), "rank 1 serves mxfp4"),
    ],
)
def test_what_fails_on_one_node_fails_the_deployment(
    nodes: Nodes, behaviours: tuple[str, str], reason: str
) -> None:
    """Both end, each with the reason: of the node that failed its own, of the other one where to look."""
    running = nodes.both(*behaviours)
    texts = []
    for each in running:
        code, _, _ = each.finish()
        assert code == ExitCode.ENGINE
        texts.append(ending(each).reason)
        assert_nothing_left(each.state_dir)
    assert any(reason in text for text in texts), texts
    assert any("first node" in text or "node 1" in text for text in texts)


def test_a_node_that_is_killed(nodes: Nodes) -> None:
    """The first one is not ready any more when nothing is heard, and ends when it stays so."""
    first, second = nodes.serving("--hang-timeout", "12")
    second.process.kill()
    eventually(lambda: "node-silent" in nodes.reasons())
    assert first.process.poll() is None
    code, _, _ = first.finish()
    assert code == ExitCode.ENGINE
    assert "nothing was heard of node 1" in ending(first).reason


def test_a_first_node_whose_container_is_killed(nodes: Nodes) -> None:
    """Nobody writes an ending, and its sidecar goes on telling of a start that serves."""
    first, second = nodes.serving("--hang-timeout", "12")
    whole = [psutil.Process(first.process.pid), *psutil.Process(first.process.pid).children(recursive=True)]
    # None of them notices that another one is gone.
    for process in whole:
        process.suspend()
    for process in whole:
        process.kill()
    eventually(lambda: "first-node-silent" in nodes.ask(1, "/readyz").text)
    code, _, _ = second.finish()
    assert code == ExitCode.ENGINE
    assert "nothing new was heard of the first node" in ending(second).reason


def test_a_node_that_is_killed_in_a_start(nodes: Nodes) -> None:
    """The others' ranks would wait for it until the start's time is over."""
    first, second = nodes.both("hangs-loading", "hangs-loading")
    eventually(lambda: bool(nodes.ask(0, "/status").json()["nodes"]))
    second.process.kill()
    code, _, _ = first.finish()
    assert code == ExitCode.ENGINE
    assert "nothing was heard of node 1" in ending(first).reason


def test_a_first_node_that_is_killed(nodes: Nodes) -> None:
    """Its sidecar lives on and tells so; whoever computed for it ends."""
    first, second = nodes.serving()
    first.process.kill()
    code, _, _ = second.finish()
    assert code == ExitCode.ENGINE
    assert "the first node" in ending(second).reason
    assert_nothing_left(second.state_dir)


def test_a_node_that_begins_anew(nodes: Nodes) -> None:
    """Its ranks of the first node's start are gone; it becomes part of the next start."""
    first, second = nodes.serving()
    second.process.kill()
    second.process.communicate()
    eventually(lambda: processes_in(second.state_dir) == [])
    again = nodes.serve(1)
    code, _, _ = first.finish()
    assert code == ExitCode.ENGINE
    assert "node 1 has begun anew" in ending(first).reason
    anew = nodes.serve(0)
    for each in (anew, again):
        each.wait_for(Phase.READY)


def test_nodes_that_were_started_differently(nodes: Nodes) -> None:
    """An hour of loading would end in a model that is half int4; the second one says what differs."""
    nodes.sidecar(0)
    nodes.sidecar(1)
    first = nodes.serve(0, "hangs-loading")
    second = nodes.serve(1, "good", "--scale-rule", "amax")
    code, _, err = second.finish()
    assert code == ExitCode.USAGE
    assert "node 1 and the first node differ in their conversion" in err
    assert first.process.poll() is None, "whose node 1 may still come"


def test_nodes_that_were_given_other_lengths(nodes: Nodes) -> None:
    """Options that only vLLM understands are compared, too: it would hang in its first collective."""
    nodes.sidecar(0)
    nodes.sidecar(1)
    nodes.serve(0, "hangs-loading")
    code, _, err = nodes.serve(1, "good", "--max-model-len", "512").finish()
    assert code == ExitCode.USAGE
    assert "node 1 and the first node differ in --max-model-len" in err


def test_a_machine_with_the_rank_of_one_that_serves(nodes: Nodes) -> None:
    """It waits and says why; what serves goes on."""
    first, second = nodes.serving()
    third = Nodes(nodes.checkpoint, nodes.directory / "third", nodes.sidecars, nodes.meeting, nodes.started)
    third.directory.mkdir()
    stray = third.serve(1)
    assert stray.process.stderr is not None
    lines = iter(stray.process.stderr.readline, "")
    assert any("node 1 is there already" in line for line in lines)
    assert (first.process.poll(), second.process.poll()) == (None, None)
    assert nodes.ask(0, "/readyz").status_code == 200
    assert stray.stop()[0] == 128 + signal.SIGTERM


def test_a_token_that_is_changed(nodes: Nodes) -> None:
    """The first node's sidecar no longer knows the other one; what serves goes on until that is mended."""
    first, second = nodes.serving()
    nodes.started[0].kill()
    nodes.started[0].communicate()
    nodes.sidecar(0, token="another")
    eventually(lambda: "first-node-silent" in nodes.ask(1, "/readyz").text)
    assert (first.process.poll(), second.process.poll()) == (None, None)


def test_a_wrong_token(nodes: Nodes) -> None:
    """Waiting would not help."""
    nodes.sidecar(0)
    nodes.sidecar(1)
    nodes.serve(0, "hangs-loading").wait_for(Phase.LOADING)
    second = nodes.serve(1, token="another")
    code, _, err = second.finish()
    assert code == ExitCode.USAGE
    assert "HTTP 401" in err
    assert TOKEN not in err


def test_no_token(nodes: Nodes) -> None:
    """Whoever may write to the first node's sidecar decides whether the deployment is ready."""
    for node in (0, 1):
        code, _, err = nodes.serve(node, token=None).finish()
        assert code == ExitCode.USAGE
        assert "needs a token" in err


def test_a_sidecar_without_a_token_hears_nobody(nodes: Nodes) -> None:
    """As long as the first node's sidecar was not told who may report, no node joins."""
    nodes.sidecar(0, token=None)
    nodes.serve(0, "hangs-loading").wait_for(Phase.LOADING)
    code, _, err = nodes.serve(1).finish()
    assert code == ExitCode.USAGE
    assert "heard only with a token" in err


def test_the_first_node_restarts_its_sidecar(nodes: Nodes) -> None:
    """A sidecar that is gone for a moment ends nothing."""
    first, second = nodes.serving()
    nodes.started[0].kill()
    nodes.started[0].communicate()
    nodes.sidecar(0)
    eventually(lambda: nodes.ask(0, "/readyz").status_code == 200)
    assert first.process.poll() is None
    assert second.process.poll() is None


def test_a_start_that_nobody_joins(nodes: Nodes) -> None:
    """Not vLLM, which waits for the others, is what to look at."""
    nodes.sidecar(0)
    code, _, err = nodes.serve(0, "hangs-loading", "--start-timeout", "3").finish()
    assert code == ExitCode.ENGINE
    assert "node 1 has not joined" in err


def test_a_port_to_meet_at_that_is_taken(nodes: Nodes) -> None:
    """Said before an hour of loading, and with the option that gives another one."""
    with socket.create_server(("127.0.0.1", nodes.meeting)):
        code, _, err = nodes.serve(0).finish()
    assert code == ExitCode.IN_USE
    assert f"--leader-port {nodes.meeting}" in err


def test_a_first_node_whose_sidecar_never_ends_its_answer(nodes: Nodes) -> None:
    """It can be stopped while it waits for the rest of an answer that comes byte by byte."""
    ended = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            while not ended.wait(0.2):
                connection.sendall(b"H")

    with socket.create_server(("127.0.0.1", nodes.sidecars[0])) as listener:
        dripping = threading.Thread(target=drip, args=(listener,))
        dripping.start()
        second = nodes.serve(1)
        second.wait_for(Phase.PREFLIGHT)
        time.sleep(1.0)
        code, _, _ = second.stop()
        ended.set()
        dripping.join()
    assert code == 128 + signal.SIGTERM
    assert_nothing_left(second.state_dir)


def test_who_lacks_what_a_node_needs(nodes: Nodes) -> None:
    """The command tells which of several nodes it must be, before anything else."""
    command = [sys.executable, str(DRIVE), "good", "serve", str(nodes.checkpoint)]
    command += ["--profile", "cpu-tiny", *SIZES]
    for arguments, said in (
        ((), "--node-rank is missing"),
        (("--node-rank", "1"), "--leader-address is missing"),
        (("--node-rank", "2", "--leader-address", "a"), "--node-rank 2: profile cpu-tiny has 2 nodes"),
        (("--node-rank", "1", "--leader-address", "http://a:1"), "is no host name or address"),
    ):
        done = subprocess.run([*command, *arguments], env=SURROUNDINGS, capture_output=True, text=True)
        assert done.returncode == ExitCode.USAGE
        assert said in done.stderr
