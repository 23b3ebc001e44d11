# SPDX-License-Identifier: Apache-2.0
"""The command line's own behaviour: one line for every mistake, and quick help."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kimi_k3 import __version__
from kimi_k3.cli import run


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        ([], 2, "--help"),
        (["checkpoint"], 2, "kimi-k3 checkpoint --help"),
        (["srve"], 2, "did you mean 'serve'?"),
        (["checkpoint", "shw"], 2, "did you mean 'show'?"),
        (["serve", "x", "--weihgts", "int4"], 2, "did you mean '--weights'?"),
        (["serve", "x", "--no-expert-paralel"], 2, "did you mean '--no-expert-parallel'?"),
        (["sidecar", "--prot", "1"], 2, "did you mean '--port'?"),
        (["serve"], 2, "checkpoint"),
        (["serve", "x", "--port", "abc"], 2, "--port"),
        (["serve", "x", "--port"], 2, "--port"),
        (["serve", "x", "y"], 2, "y"),
        (["sidecar", "--port", "99999"], 2, "--port"),
        (["serve", "x", "--profile", "cpu-tyni"], 2, "did you mean 'cpu-tiny'?"),
        (["serve", "x", "--weights", "int5"], 2, "did you mean 'int4'?"),
        (["serve", "x", "--weights", "int4"], 3, "--accept-lossy"),
        (["serve", "/no/such/dir"], 4, "/no/such/dir"),
        (["checkpoint", "show", "/no/such/dir"], 4, "/no/such/dir"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error, with the remedy, with the right exit code; no frame and no traceback."""
    assert run(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kimi-k3: error: ")
    assert err.count("\n") == 1
    assert part in err
    assert ";" in err


def test_a_bad_consent_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``yes`` could be meant either way, so it is neither."""
    monkeypatch.setenv("KIMI_K3_ACCEPT_LOSSY", "yes")
    assert run(["serve", "x", "--weights", "int4"]) == 2
    assert "KIMI_K3_ACCEPT_LOSSY" in capsys.readouterr().err


def test_make_then_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny checkpoint is whole; without a shard the exit code is 4, for people and programs."""
    directory = tmp_path / "tiny"
    assert run(["checkpoint", "make", str(directory), "--seed", "1"]) == 0
    assert run(["checkpoint", "show", str(directory)]) == 0
    assert "shards: 3 ok" in capsys.readouterr().out
    sorted(directory.glob("*.safetensors"))[0].unlink()
    assert run(["checkpoint", "show", str(directory), "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["servable"] is False


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the number, for scripts."""
    assert run(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    """Half a second is what one waits without noticing; the modules are what keeps it so."""
    heavy = "{'torch', 'vllm', 'pydantic', 'httpx', 'fastapi', 'rich', 'numpy', 'yaml'}"
    code = f"import sys, kimi_k3.cli as c; c.run(['--help']); print(sorted({heavy} & set(sys.modules)))"
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    # Twice the promise: the machine that tests may be busy.
    assert time.monotonic() - begun < 1.0


def test_the_supervisor_imports_neither_torch_nor_vllm() -> None:
    """All checks together take less than three seconds, which their imports alone would exceed."""
    code = "import sys, kimi_k3.supervisor.serve; print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    """``kimi-k3 checkpoint show | head -1`` is not an error worth a traceback."""
    run(["checkpoint", "make", str(tmp_path / "tiny")])
    script = f"{sys.executable} -m kimi_k3.cli checkpoint show {tmp_path / 'tiny'} | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""
