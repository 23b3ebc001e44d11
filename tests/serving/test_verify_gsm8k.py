# SPDX-License-Identifier: Apache-2.0
"""verify gsm8k against a real vLLM with the miniature, also when it is killed under it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from kimi_k3.checkpoint import MINIATURE
from kimi_k3.verify.keeping import read_results
from kimi_k3.verify.results import Result, State
from tests.serving.conftest import API_KEY
from tests.serving.deployment import COMMAND, Deployment, Mode, environment, started

pytestmark = pytest.mark.engine

VERIFY_SECONDS = 900


def asking(deployment: Deployment, out: Path, *words: str) -> subprocess.Popen[str]:
    """The command with the key in its environment, in a directory whose files shadow lm_eval's modules."""
    out.mkdir()
    (out / "datasets.py").write_text("raise SystemExit('not this one')\n")
    urls = ("--engine", deployment.engine_url, "--sidecar", deployment.sidecar_url, "--out", str(out))
    return subprocess.Popen(
        [COMMAND, "verify", "gsm8k", *words, *urls],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=out,
        env=environment(KIMI_K3_API_KEY=API_KEY),
    )


def kept_in(out: Path) -> Result:
    (result,) = read_results(out)
    return result


def answered(out: Path) -> int:
    """How many answers the result counts by now."""
    found = read_results(out)[0].figures if (out / "gsm8k.json").exists() else ()
    return round(found[0].value) if found else 0


def without_key(out: Path) -> bool:
    return not any(API_KEY.encode() in path.read_bytes() for path in out.rglob("*") if path.is_file())


def test_own_word_problems_then_killed(tmp_path: Path) -> None:
    """The miniature answers by both filters; killed under the next run it leaves one line and a score."""
    with started(MINIATURE, tmp_path, Mode(), api_key=API_KEY, killed=True) as served:
        output, errors = asking(served, tmp_path / "whole", "--limit", "20").communicate(
            timeout=VERIFY_SECONDS
        )
        whole = kept_in(tmp_path / "whole")
        assert whole.state is State.PASS, (output, errors, whole)
        shares = {figure.name: (figure.value, figure.count) for figure in whole.figures}
        assert shares["strict-match"][0] >= 0.95
        assert shares["flexible-extract"][0] >= 0.95
        assert {count for _, count in shares.values()} == {20}
        assert (whole.subject.checkpoint, whole.settings["task"]) == ("miniature", "miniature_word_problems")
        # Of 1024 tokens no 512 are left beside the longest prompt, and that is said.
        tokens = whole.settings["max_gen_toks"]
        assert isinstance(tokens, int)
        assert 64 <= tokens < 512
        assert f"max_gen_toks {tokens} and not 512" in output
        assert without_key(tmp_path / "whole")

        broken = asking(served, tmp_path / "broken", "--limit", "1000", "--concurrency", "4")
        deadline = time.monotonic() + VERIFY_SECONDS
        while answered(tmp_path / "broken") < 5:
            assert broken.poll() is None, broken.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        for process in psutil.Process(served.supervisor.pid).children(recursive=True):
            process.kill()
        output, errors = broken.communicate(timeout=VERIFY_SECONDS)
    assert broken.returncode == 1, (output, errors)
    (line,) = errors.splitlines()
    assert "verify gsm8k: the server" in line
    assert "Traceback" not in errors
    part = kept_in(tmp_path / "broken")
    assert (part.state, part.ended) == (State.FAIL, None)
    assert part.broken_off is not None
    assert [figure.name for figure in part.figures] == ["strict-match", "flexible-extract"]
    for figure in part.figures:
        assert figure.count is not None
        assert 5 <= figure.count < 1000
        assert figure.value > 0.5
    assert without_key(tmp_path / "broken")
