# SPDX-License-Identifier: Apache-2.0
"""Every verification of a real vLLM with the miniature, and what is left when it is killed under them.

One start serves both tests; the second kills it.
"""

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
from kimi_k3.verify.results import Kind, Result, State
from tests.serving.conftest import API_KEY
from tests.serving.deployment import COMMAND, Deployment, Mode, environment, started

pytestmark = pytest.mark.engine

VERIFY_SECONDS = 900


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("miniature")
    with started(MINIATURE, directory, Mode(), api_key=API_KEY, killed=True) as ready:
        yield ready


def asking(deployment: Deployment, out: Path, *words: str) -> subprocess.Popen[str]:
    """The command with the key in its environment, in a directory whose files shadow modules."""
    out.mkdir()
    (out / "datasets.py").write_text("raise SystemExit('not this one')\n")
    urls = ("--engine", deployment.engine_url, "--sidecar", deployment.sidecar_url, "--out", str(out))
    return subprocess.Popen(
        [COMMAND, "verify", *words, *urls],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=out,
        env=environment(KIMI_K3_API_KEY=API_KEY),
    )


def kept_in(out: Path) -> Result:
    (result,) = read_results(out)
    return result


def without_key(out: Path) -> bool:
    return not any(API_KEY.encode() in path.read_bytes() for path in out.rglob("*") if path.is_file())


def test_all(served: Deployment, tmp_path: Path) -> None:
    """Each verification runs, with the key and without telling it, and finds what the exact miniature is.

    It answers what it was never taught, alone and through lm_eval by both filters, and finds codes; vLLM's
    own benchmark is understood; and the int4 kernel of this machine rounds to bf16, and no more.
    """
    out = tmp_path / "all"
    process = asking(served, out, "all", "--profile", "cpu-tiny", "--short")
    output, errors = process.communicate(timeout=VERIFY_SECONDS)
    results = {result.kind: result for result in read_results(out)}
    assert results.keys() == set(Kind), (output, errors)
    assert {result.state for result in results.values()} == {State.PASS}, output
    assert process.returncode == 0, (output, errors)
    assert errors == ""
    assert all(result.ended for result in results.values())
    subjects = {
        (one.subject.checkpoint, one.subject.profile, one.subject.served_as) for one in results.values()
    }
    assert subjects == {("miniature", "cpu-tiny", "mxfp4")}
    figures = {kind: {one.name: one for one in result.figures} for kind, result in results.items()}

    right = figures[Kind.ACCURACY]["right answers, mxfp4"]
    assert right.value >= 0.95
    assert right.count == 40
    assert 1 <= figures[Kind.ACCURACY]["perplexity of answers, mxfp4"].value < 1.01
    (predictions,) = read(out, warn=print)
    assert all(len(at.likeliest) == 20 for one in predictions.predicted for at in one.positions)

    assert figures[Kind.GSM8K].keys() == {"strict-match", "flexible-extract"}
    assert all(one.value >= 0.95 and one.count == 20 for one in figures[Kind.GSM8K].values())
    # Of 1024 tokens no 512 are left beside the longest prompt, and that is said.
    tokens = results[Kind.GSM8K].settings["max_gen_toks"]
    assert isinstance(tokens, int)
    assert 64 <= tokens < 512
    assert f"max_gen_toks {tokens} and not 512" in output

    found = sum(round(one.value * (one.count or 0)) for one in figures[Kind.LONG].values())
    assert found >= sum(one.count or 0 for one in figures[Kind.LONG].values()) - 1
    assert max(results[Kind.LONG].curves[0].x) > 500

    rows = [row.evidence.split(" requests")[0] for row in results[Kind.BENCH].rows]
    assert rows == ["4/4", "12/12"]
    assert figures[Kind.BENCH]["128/16, concurrency 4: TTFT, median"].value > 0
    assert figures[Kind.BENCH]["128/16, concurrency 4: output"].value > 0

    assert len(figures[Kind.KERNEL]) == 10
    assert all(0.001 < one.value < 0.03 for one in figures[Kind.KERNEL].values())

    table = output.partition("--- what upstream validated\n")[2].splitlines()
    assert "pass    vllm bench serve without errors" in "\n".join(table)
    assert [line[:8] for line in table].count("fail    ") == 0
    assert table[-1] == f"report: {out / 'report.html'}"
    assert (out / "report.md").exists()
    assert not list(out.glob("gsm8k/*/scratch"))
    assert without_key(out)


def test_a_server_killed_under_them(served: Deployment, tmp_path: Path) -> None:
    """Each ends by itself, with one line, keeps what it had measured and makes the report of it."""
    # The second load takes many minutes.
    loads = ("--sweep", "8/1/1/1", "--sweep", "64/900/2/40")
    bench = asking(served, tmp_path / "bench", "bench", "--no-standard", *loads)
    until(lambda: "main benchmark" in text(tmp_path / "bench" / "bench" / "64-900-2-40.log"), bench)
    gsm8k = asking(served, tmp_path / "gsm8k", "gsm8k", "--limit", "1000", "--concurrency", "3")
    until(lambda: answered(tmp_path / "gsm8k") >= 2, bench, gsm8k)
    accuracy = asking(served, tmp_path / "accuracy", "accuracy", "--count", "1000", "--at-a-time", "2")
    long = asking(served, tmp_path / "long", "long", "--each", "100")
    all_of_them = (bench, gsm8k, accuracy, long)
    until(lambda: bool(figures(tmp_path / "long")) and bool(figures(tmp_path / "accuracy")), *all_of_them)
    for process in psutil.Process(served.supervisor.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    running = {"accuracy": accuracy, "bench": bench, "long": long, "gsm8k": gsm8k}
    ended = {kind: process.communicate(timeout=VERIFY_SECONDS) for kind, process in running.items()}
    assert [process.returncode for process in running.values()] == [1, 1, 1, 1], ended
    for kind, (_, errors) in ended.items():
        (line,) = errors.strip().splitlines()
        result = kept_in(tmp_path / kind)
        assert f"verify {kind}: " in line
        assert "the server" in line
        assert str(tmp_path / kind / f"{kind}.json") in line
        assert "the server" in (result.broken_off or "")
        assert (result.state, result.ended) == (State.FAIL, None)
        assert result.figures
        assert (tmp_path / kind / "report.html").exists()
        assert without_key(tmp_path / kind)
    assert [row.state for row in kept_in(tmp_path / "bench").rows] == [State.PASS, State.FAIL]
    assert kept_in(tmp_path / "long").rows[0].evidence.startswith("partial, ")
    part = kept_in(tmp_path / "gsm8k").figures
    assert [figure.name for figure in part] == ["strict-match", "flexible-extract"]
    assert all(2 <= (figure.count or 0) < 1000 and figure.value > 0.5 for figure in part)


def figures(out: Path) -> int:
    """How many are kept so far."""
    return sum(len(result.figures) for result in read_results(out))


def answered(out: Path) -> int:
    """How many answers lm_eval has by now."""
    return sum(round(figure.value) for result in read_results(out) for figure in result.figures)


def text(path: Path) -> str:
    """What is in a file that may not be there yet."""
    return path.read_text() if path.exists() else ""


def until(done: Callable[[], bool], *running: subprocess.Popen[str]) -> None:
    """Wait for it, as long as these run."""
    deadline = time.monotonic() + VERIFY_SECONDS
    while not done():
        assert all(process.poll() is None for process in running), [one.args for one in running]
        assert time.monotonic() < deadline
        time.sleep(0.2)
