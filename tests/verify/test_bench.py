# SPDX-License-Identifier: Apache-2.0
"""verify bench: the loads, vLLM's JSON, what is compared with upstream, and what is kept.

vLLM's own benchmark runs in tests/serving/test_verify.py; here a script stands in for it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimi_k3.cli.application import run
from kimi_k3.errors import OperatorError
from kimi_k3.verify import bench
from kimi_k3.verify.bench import (
    UPSTREAM,
    Load,
    bench_command,
    bench_environment,
    curves_of,
    figures_of,
    fitted,
    parse_load,
    planned,
    read_measured,
    row_of,
    run_bench,
    tokenizer_of,
)
from kimi_k3.verify.keeping import Broken, read_results
from kimi_k3.verify.results import Result, State
from tests.verify.openai_server import CARD, Server, running

SMALL = Load(64, 8, 2, 4)


def raw(load: Load, *, failed: int = 0, **changes: Any) -> dict[str, Any]:
    """What vLLM writes, with a key that is not read."""
    completed = load.prompts - failed
    times = {f"{how}_{what}_ms": 10.0 for how in ("mean", "median", "p99") for what in ("ttft", "tpot")}
    return {
        "completed": completed,
        "failed": failed,
        "output_lens": [load.output] * completed + [0] * failed,
        "errors": [""] * completed + ["Traceback:\n  x\nConnectionError: refused\n"] * failed,
        "request_throughput": 2.0,
        "output_throughput": 16.0,
        "a key of a later version": [1],
        **times,
        **changes,
    }


def measured(tmp_path: Path, load: Load, **changes: Any) -> bench.Measured:
    path = tmp_path / "vllm.json"
    path.write_text(json.dumps(raw(load, **changes)))
    return read_measured(path)


@pytest.mark.parametrize(
    "text", ["", "1024", "1024/128/1", "0/1/1/1", "1/2/3/4/5", "a/1/1/1", "-1/1/1/1", "1/1/1/\u0661"]
)
def test_no_load(text: str) -> None:
    """A slip must not become another load."""
    with pytest.raises(OperatorError, match="is no load"):
        parse_load(text)


@pytest.mark.parametrize(
    ("limit", "lengths"),
    [
        (None, (1024, 128)),
        (1168, (1024, 128)),
        (1167, (512, 128)),
        (1024, (512, 128)),
        (256, (128, 64)),
        (100, (32, 32)),
    ],
)
def test_fitted(limit: int | None, lengths: tuple[int, int]) -> None:
    """A server of short contexts gets upstream's load as far as it takes it, the answer last to shrink."""
    load = fitted(UPSTREAM[0], limit)
    assert limit is None or load.input + load.output < limit
    assert (load.input, load.output, load.concurrency, load.prompts) == (*lengths, 1, 10)


def test_planned() -> None:
    """What an operator asks for is never changed in silence; upstream's loads come first."""
    assert planned([SMALL, SMALL], 1024, standard=False) == [(SMALL, SMALL)]
    assert [wanted for _, wanted in planned([SMALL], 1024, standard=True)] == [*UPSTREAM, SMALL]
    with pytest.raises(OperatorError, match="the server takes 64"):
        planned([SMALL], 64, standard=False)
    with pytest.raises(OperatorError, match="nothing to measure"):
        planned([], 64, standard=False)


def test_published_is_compared_with_the_same_load_only(tmp_path: Path) -> None:
    """A reduced load is another measurement: that must be said, and no published number stand beside it."""
    wanted = UPSTREAM[1]
    found = measured(tmp_path, wanted)
    same = row_of(wanted, wanted, found, 4096)
    assert (same.state, figures_of(wanted, found)[0].published) == (State.PASS, 160)
    assert "upstream: 160/160 (8 x MI325X" in same.evidence
    less = fitted(wanted, 1024)
    reduced = row_of(less, wanted, found, 1024)
    assert reduced.state is State.PASS
    assert "512/128 instead of 1024/128, for the server takes 1024 tokens" in reduced.evidence
    for other in (less, replace(wanted, prompts=8)):
        assert [figure.published for figure in figures_of(other, found)] == [None] * len(
            figures_of(other, found)
        )


def test_errors_fail(tmp_path: Path) -> None:
    """One request of four that did not come back, with the last line of its traceback."""
    row = row_of(SMALL, SMALL, measured(tmp_path, SMALL, failed=1), 1024)
    assert row.state is State.FAIL
    assert row.evidence.startswith("3/4 requests without a server error; ")
    assert "the first error: ConnectionError: refused" in row.evidence


def test_broken_answers_fail(tmp_path: Path) -> None:
    """vLLM's benchmark calls an answer that broke off after a token a success."""
    row = row_of(SMALL, SMALL, measured(tmp_path, SMALL, output_lens=[8, 8, 1, 8]), 1024)
    assert row.state is State.FAIL
    assert "1 of them without all 8 tokens" in row.evidence


def test_no_times_of_nothing(tmp_path: Path) -> None:
    """Where no request came back vLLM writes times of 0 ms: nobody measured those."""
    found = measured(tmp_path, SMALL, failed=4, mean_ttft_ms=0.0, median_ttft_ms=0.0)
    assert [figure.unit for figure in figures_of(SMALL, found)] == ["", ""]
    assert curves_of({SMALL: found}) == []
    assert "TTFT" not in row_of(SMALL, SMALL, found, 1024).evidence


def test_curves(tmp_path: Path) -> None:
    """Points over concurrency in its order, whatever the loads'; other lengths are another curve."""
    more, longer = replace(SMALL, concurrency=8), replace(SMALL, input=128)
    found = {
        more: measured(tmp_path, more, output_throughput=50),
        SMALL: measured(tmp_path, SMALL),
        longer: measured(tmp_path, longer),
    }
    curves = {(curve.plot, curve.name): (curve.x, curve.y) for curve in curves_of(found)}
    assert curves["throughput over concurrency", "64/8"] == ((2, 8), (16, 50))
    assert curves["time to first token over concurrency", "128/8"] == ((2,), (10,))
    assert len(curves) == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "Invalid JSON"), ("[]", "should be an object"), ("{}", "completed: Field required")],
)
def test_no_result(tmp_path: Path, text: str, said: str) -> None:
    """Another vLLM may write something else: what lacks is named."""
    path = tmp_path / "vllm.json"
    path.write_text(text)
    with pytest.raises(Broken, match=said):
        read_measured(path)


def test_not_a_number(tmp_path: Path) -> None:
    """Python writes NaN into JSON; a result cannot hold it."""
    with pytest.raises(Broken, match="mean_ttft_ms"):
        measured(tmp_path, SMALL, mean_ttft_ms=float("nan"))


def test_what_the_benchmark_is_given(tmp_path: Path) -> None:
    """The key is not in the command, another API's key and proxies are not in the environment."""
    target = replace(
        Server(lambda _: None).target,
        engine="https://engine.example:8000",
        api_key="ours",
        authorities=tmp_path / "ca.pem",
    )
    command = bench_command(
        SMALL, target, "kimi-k3", tmp_path, tmp_path / "a.json", seed=3, remote_code=False
    )
    assert not any("ours" in word for word in command)
    assert not {"--insecure", "--trust-remote-code"} & set(command)
    environ = {"OPENAI_API_KEY": "theirs", "https_proxy": "http://p", "NO_PROXY": "*", "PATH": "/bin"}
    assert bench_environment(environ, target) == {
        "PATH": "/bin",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "OPENAI_API_KEY": "ours",
        "SSL_CERT_FILE": str(tmp_path / "ca.pem"),
    }
    keyless = replace(target, engine="https://127.0.0.1:8000", api_key=None, authorities=None)
    assert "OPENAI_API_KEY" not in bench_environment(environ, keyless)
    local = bench_command(SMALL, keyless, "kimi-k3", tmp_path, tmp_path / "a.json", seed=3, remote_code=True)
    assert {"--insecure", "--trust-remote-code"} < set(local)


def test_tokenizer(tmp_path: Path) -> None:
    """A wrong path is an error; where the server read it is only tried."""
    assert tokenizer_of(None, None) is None
    assert tokenizer_of(None, str(tmp_path)) is None
    with pytest.raises(OperatorError, match=r"has no tokenizer_config\.json"):
        tokenizer_of(tmp_path, None)
    (tmp_path / "tokenizer_config.json").touch()
    assert tokenizer_of(None, str(tmp_path)) == tokenizer_of(tmp_path, "/nowhere") == tmp_path


SCRIPT = """
import json, sys, urllib.request
flags = dict(one[2:].split("=", 1) for one in sys.argv[1:] if "=" in one)
print("measuring")
request = urllib.request.Request(flags["base-url"] + "/v1/completions", b"{}")
try:
    said = json.load(urllib.request.urlopen(request))
except OSError:
    said = FAILED
if isinstance(said, str):
    sys.exit(said)
json.dump(said, open(flags["result-dir"] + "/" + flags["result-filename"], "w"))
"""
"""In the place of vLLM's benchmark: one request, whose answer it writes; text ends it instead."""


def looked(
    monkeypatch: pytest.MonkeyPatch, server: Server, out: Path, *loads: Load, without: Any = None
) -> tuple[State, list[str]]:
    """The state and the lines, with the script in vLLM's place."""
    (out / "tokenizer_config.json").touch()
    command = bench.bench_command
    script = SCRIPT.replace("FAILED", repr(without))
    monkeypatch.setattr(
        bench, "bench_command", lambda *a, **k: [sys.executable, "-c", script, *command(*a, **k)[3:]]
    )
    told: list[str] = []
    state = run_bench(
        server.target,
        out,
        checkpoint=out,
        sweeps=loads,
        standard=False,
        seed=0,
        remote_code=False,
        report=told.append,
    )
    return state, told


def kept_in(out: Path) -> Result:
    (result,) = read_results(out)
    return result


def test_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each load, and the same in the file, with vLLM's own JSON and log beside it."""
    more = replace(SMALL, concurrency=4)
    with running(Server(lambda _: (200, json.dumps(raw(SMALL))))) as server:
        state, told = looked(monkeypatch, server, tmp_path, SMALL, more)
    result = kept_in(tmp_path)
    assert state is result.state is State.PASS
    assert result.settings["loads"] == "64/8/2/4 64/8/4/4"
    assert told == [f"pass    {row.name}: {row.evidence}" for row in result.rows]
    assert len(told) == 2
    assert read_measured(tmp_path / "bench" / "64-8-2-4.json").completed == 4
    assert (tmp_path / "bench" / "64-8-4-4.log").read_text() == "measuring\n"


def test_killed_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first load stays, and so do the second one's requests that came back; the third is not tried."""
    loads = [replace(SMALL, concurrency=n) for n in (1, 2, 3)]

    def first_only(_: object) -> tuple[int, str] | None:
        return (200, json.dumps(raw(SMALL))) if len(server.asked) == 1 else None

    with running(Server(first_only)) as server, pytest.raises(OperatorError) as caught:
        looked(monkeypatch, server, tmp_path, *loads, without=raw(SMALL, failed=3))
    result = kept_in(tmp_path)
    assert [row.state for row in result.rows] == [State.PASS, State.FAIL]
    assert "the server is gone" in (result.broken_off or "")
    assert result.ended is None
    assert str(tmp_path / "bench.json") in str(caught.value)
    assert "\n" not in str(caught.value)


BROKEN: dict[str, tuple[Any, str]] = {
    "an exit code": ("no such model\nin any case", "ended with exit code 1: in any case"),
    "nonsense": ({"hello": 1}, "is no result of vllm bench serve: completed: Field required"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_benchmark_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """With the server well, it is the benchmark's own last line that tells."""
    answer, said = BROKEN[case]
    with (
        running(Server(lambda _: (200, json.dumps(answer)))) as server,
        pytest.raises(OperatorError, match=said),
    ):
        looked(monkeypatch, server, tmp_path, SMALL)
    assert said in (kept_in(tmp_path).broken_off or "")


def test_errors_of_a_server_that_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load is tried: which of them bring errors is what one wants to know."""
    loads = (SMALL, replace(SMALL, concurrency=4))
    with running(Server(lambda _: (200, json.dumps(raw(SMALL, failed=2))))) as server:
        state, told = looked(monkeypatch, server, tmp_path, *loads)
    assert (state, [line[:4] for line in told]) == (State.FAIL, ["fail", "fail"])
    assert kept_in(tmp_path).broken_off is None


@pytest.mark.parametrize("case", ["vLLM", "tokenizer"])
def test_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """Without what it takes nothing is measured, which is said of each load and is no success."""
    monkeypatch.setattr(bench, "installed_vllm", lambda: None if case == "vLLM" else "vllm 0.32.0")
    with running(Server(lambda _: None)) as server:
        code = run(["verify", "bench", "--engine", server.url, "--no-sidecar", "--out", str(tmp_path)])
    assert code == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines] == [*["not run "] * 2, "report: "]
    assert ("vLLM is not installed" if case == "vLLM" else "give --checkpoint") in lines[0]
    assert kept_in(tmp_path).state is State.NOT_RUN


@pytest.mark.parametrize("card", [{**CARD, "id": None}, 7])
def test_strange_models(tmp_path: Path, card: Any) -> None:
    """A server that is no vLLM tells other things: no traceback."""
    with running(Server(lambda _: None, card=card)) as server:
        code = run(["verify", "bench", "--engine", server.url, "--no-sidecar", "--out", str(tmp_path)])
    assert code == 1
