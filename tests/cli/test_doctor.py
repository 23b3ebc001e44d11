# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 doctor``: logs, exit codes and state directories, for people and for programs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_k3.cli import run
from kimi_k3.diagnosis.catalogue import load_catalogue
from kimi_k3.journal.models import Ending, Explanation, failure_file
from kimi_k3.journal.writer import write_record
from tests.journal.records import NOW, failure, supervisor

LLVM = "LLVM ERROR: Do not know how to expand this operator's operand!"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "engine.txt"
    path.write_text(f"INFO well\n{LLVM}\nRuntimeError: Engine core initialization failed.\n")
    return path


def test_a_log_is_explained(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cause, remedy, the line, and what else was seen."""
    assert run(["doctor", "--log", str(log)]) == 0
    out = capsys.readouterr().out
    for part in (
        "cause: a FlyDSL fp4 kernel",
        "remedy: serve --weights int4",
        f"line 2: {LLVM}",
        "also seen: init",
    ):
        assert part in out
    assert "not visible in a log" not in out


def test_an_unknown_log_says_so(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the last error lines, and with what no log could show."""
    log.write_text("ValueError: odd\n")
    assert run(["doctor", "--log", str(log), "--exit-code", "1"]) == 1
    out = capsys.readouterr().out
    assert "unknown: no known failure in" in out
    assert "error line 1: ValueError: odd" in out
    assert all(f"not visible in a log: {row.name}" in out for row in load_catalogue().symptoms)


@pytest.mark.parametrize(("code", "part"), [("-9", "out-of-memory killer"), ("139", "segmentation fault")])
def test_an_exit_code_alone(code: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Sometimes that is all there is."""
    assert run(["doctor", "--exit-code", code]) == 0
    assert part in capsys.readouterr().out
    assert run(["doctor", "--exit-code", "0"]) == 1


def test_json_for_programs(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same, with null for what is not known."""
    assert run(["doctor", "--log", str(log), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["found"] is True
    assert report["diagnosis"]["finding"]["name"] == "flydsl-wide-lds-load"
    assert report["exit_code"] is None
    log.write_bytes(b"")
    assert run(["doctor", "--log", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["diagnosis"]["finding"] is None


def test_standard_input_is_read_once() -> None:
    """A pipe cannot be read twice, and may hold anything."""
    command = [sys.executable, "-m", "kimi_k3.cli", "doctor", "--log", "-"]
    text = b"\xff\0" * 1000 + b"\n" + LLVM.encode()
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    assert done.returncode == 0
    assert f"line 2: {LLVM}" in done.stdout.decode()
    assert done.stderr == b""


def test_what_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A FIFO would be waited for, and a directory has no lines."""
    os.mkfifo(tmp_path / "fifo")
    for path, code, part in (
        (tmp_path / "none", 1, "No such file"),
        (tmp_path, 1, "it is a directory"),
        (tmp_path / "fifo", 1, "it is a FIFO"),
        (Path("/dev/zero"), 1, "it is a device"),
    ):
        assert run(["doctor", "--log", str(path)]) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"kimi-k3: error: --log {path}: ")
        assert part in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--log", ""], 2, "--log: is empty"),
        (["--exit-code", "256"], 2, "is not an exit code"),
        (["--exit-code", "nine"], 2, "--exit-code"),
        (["--lgo", "x"], 2, "did you mean '--log'?"),
        (["--state", "/no/such/dir"], 6, "No such file"),
        (["--state", "/dev/null"], 6, "not a directory"),
        (["--state", ""], 2, "--state: is empty"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As everywhere in this command line."""
    assert run(["doctor", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert part in err
    assert err.count("\n") == 1


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts act on them."""
    assert run(["doctor", "--help"]) == 0
    assert "0: a cause was found; 1: unknown" in " ".join(capsys.readouterr().out.split())


def ended(state: Path, explanation: Explanation | None) -> None:
    ending = Ending(at=NOW, exit_code=7, reason="vLLM failed; read on", explanation=explanation)
    write_record(state, "supervisor.json", supervisor(ending=ending))


def test_a_state_directory_tells_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How the start ended, what its processes said, and what its log holds."""
    ended(tmp_path, None)
    (tmp_path / "engine.log").write_text(LLVM)
    (tmp_path / "engine.log.1").write_text("")
    write_record(tmp_path, failure_file(7), failure(7, what="layer 3: no kernel", remedy="install it"))
    assert run(["doctor", "--state", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for part in (
        "exit code 7: vLLM failed",
        "reported by pid 7: layer 3",
        "install it",
        LLVM,
        "engine.log.1",
    ):
        assert part in out


def test_what_the_supervisor_recorded_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It knew the exit code of vLLM, which is nowhere else."""
    ended(tmp_path, Explanation(name="worker-killed", cause="killed from outside", remedy="look in dmesg"))
    (tmp_path / "engine.log").write_text("")
    assert run(["doctor", "--state-dir", str(tmp_path)]) == 0
    assert "cause: killed from outside" in capsys.readouterr().out


def test_without_options_the_default_state_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed a moment ago is what one asks about."""
    monkeypatch.setenv("KIMI_K3_STATE_DIR", str(tmp_path))
    assert run(["doctor"]) == 6
    assert "nothing was started with it" in capsys.readouterr().err
    ended(tmp_path, None)
    (tmp_path / "engine.log").write_text(LLVM)
    assert run(["doctor"]) == 0


def test_a_closed_standard_input_is_an_empty_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing to read is nothing known."""
    with Path(os.devnull).open("rb") as nothing:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(nothing))
        assert run(["doctor", "--log", "-"]) == 1
    assert "standard input (0 lines)" in capsys.readouterr().out
