# SPDX-License-Identifier: Apache-2.0
"""verify accuracy, bench and long against a real vLLM with the miniature, also when it is killed."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kimi_k3.checkpoint import MINIATURE
from kimi_k3.verify.keeping import read_results
from kimi_k3.verify.predictions import read
from kimi_k3.verify.results import Result, State
from tests.serving.conftest import API_KEY
from tests.serving.deployment import COMMAND, Deployment, Mode, environment, started

pytestmark = pytest.mark.engine

VERIFY_SECONDS = 900


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with started(MINIATURE, tmp_path_factory.mktemp("miniature"), Mode(), api_key=API_KEY) as ready:
        yield ready


def asking(deployment: Deployment, out: Path, *words: str) -> subprocess.Popen[str]:
    """``kimi-k3 verify`` with the key in the environment."""
    urls = ("--engine", deployment.engine_url, "--sidecar", deployment.sidecar_url, "--out", str(out))
    return subprocess.Popen(
        [COMMAND, "verify", *words, *urls],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(KIMI_K3_API_KEY=API_KEY),
    )


def kept_in(out: Path) -> Result:
    (result,) = read_results(out)
    return result


def test_bench(served: Deployment, tmp_path: Path) -> None:
    """vLLM's own benchmark runs here, with the key, and its JSON is understood; the key is in no file."""
    words = ("bench", "--no-standard", "--sweep", "64/4/1/2", "--sweep", "64/4/2/4")
    output, errors = asking(served, tmp_path, *words).communicate(timeout=VERIFY_SECONDS)
    result = kept_in(tmp_path)
    assert result.state is State.PASS, (output, errors, result)
    assert [line.split(" requests")[0] for line in output.splitlines()] == [
        "pass    bench 64/4, concurrency 1: 2/2",
        "pass    bench 64/4, concurrency 2: 4/4",
        f"report: {tmp_path / 'report.html'}",
    ]
    figures = {figure.name: figure.value for figure in result.figures}
    assert figures["64/4, concurrency 2: TTFT, median"] > 0
    assert figures["64/4, concurrency 2: output"] > 0
    assert (result.subject.checkpoint, result.subject.profile) == ("miniature", "cpu-tiny")
    assert not any(API_KEY in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_accuracy(served: Deployment, tmp_path: Path) -> None:
    """The exact miniature answers what it was never taught, and every position tells its likeliest tokens."""
    output, errors = asking(served, tmp_path, "accuracy", "--count", "40").communicate(timeout=VERIFY_SECONDS)
    result = kept_in(tmp_path)
    figures = {figure.name: figure for figure in result.figures}
    assert figures["right answers, mxfp4"].value >= 0.95, (output, errors)
    assert figures["right answers, mxfp4"].count == 40
    assert 1 <= figures["perplexity of answers, mxfp4"].value < 1.01
    (predictions,) = read(tmp_path, warn=print)
    assert all(len(at.likeliest) == 20 for one in predictions.predicted for at in one.positions)
    assert {row.state for row in result.rows} == {State.PASS, State.NOT_RUN}


def test_long(served: Deployment, tmp_path: Path) -> None:
    """The miniature was taught to find codes: up to 512 tokens it finds nearly all of them."""
    output, errors = asking(served, tmp_path, "long", "--up-to", "512", "--each", "3").communicate(
        timeout=VERIFY_SECONDS
    )
    result = kept_in(tmp_path)
    assert (result.broken_off, len(result.rows)) == (None, len(output.splitlines()) - 1), errors
    found = sum(round(figure.value * (figure.count or 0)) for figure in result.figures)
    asked = sum(figure.count or 0 for figure in result.figures)
    assert asked >= 9
    assert found >= asked - 1, output
    assert max(result.curves[0].x) > 250


def test_a_server_killed_under_all(tmp_path: Path) -> None:
    """Each ends by itself, with one line, keeps what it had measured and makes the report of it."""
    with started(MINIATURE, tmp_path, Mode(), api_key=API_KEY, killed=True) as served:
        # The second load takes many minutes.
        loads = ("--sweep", "8/1/1/1", "--sweep", "64/900/2/40")
        bench = asking(served, tmp_path / "bench", "bench", "--no-standard", *loads)
        until(lambda: "main benchmark" in text(tmp_path / "bench" / "bench" / "64-900-2-40.log"))
        accuracy = asking(served, tmp_path / "accuracy", "accuracy", "--count", "1000")
        long = asking(served, tmp_path / "long", "long")
        until(lambda: bool(rows(tmp_path / "long")))
        until(lambda: any(one.figures for one in read_results(tmp_path / "accuracy")))
        for process in psutil.Process(served.supervisor.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        running = {"accuracy": accuracy, "bench": bench, "long": long}
        ended = {kind: process.communicate(timeout=300) for kind, process in running.items()}
    assert [process.returncode for process in running.values()] == [1, 1, 1], ended
    for kind, (_, errors) in ended.items():
        (line,) = errors.strip().splitlines()
        result = kept_in(tmp_path / kind)
        assert "the server is gone" in line
        assert str(tmp_path / kind / f"{kind}.json") in line
        assert "the server is gone" in (result.broken_off or "")
        assert result.ended is None
        assert result.rows[0].state is State.PASS
        assert (tmp_path / kind / "report.html").exists()
    assert kept_in(tmp_path / "bench").rows[1].state is State.FAIL


def rows(out: Path) -> int:
    """How many are kept so far."""
    return sum(len(result.rows) for result in read_results(out))


def text(path: Path) -> str:
    """What is in a file that may not be there yet."""
    return path.read_text() if path.exists() else ""


def until(done: Callable[[], bool]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + VERIFY_SECONDS
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)
