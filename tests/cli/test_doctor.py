# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 doctor``: logs, exit codes and state directories, for people and for programs."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kimi_k3.cli import run
from kimi_k3.diagnosis.catalogue import load_catalogue
from kimi_k3.journal.models import Ending, Explanation, PhaseChange, failure_file
from kimi_k3.journal.writer import now, write_record
from kimi_k3.words.phases import Phase
from tests.journal.records import NOW, failure, supervisor

OUT_OF_MEMORY = "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.15 GiB"
STOPPED = """\
(APIServer pid=1) INFO 10-20 12:00:00 [api_utils.py:286] non-default args: {'model': '/models/k3'}
(Worker pid=9) INFO 10-20 12:00:00 [default_loader.py:502] Loading weights took 5711.30 seconds
INFO:     Application startup complete.
(APIServer pid=1) INFO 10-20 13:00:00 [launcher.py:254] [shutdown] API server: shutdown triggered
(APIServer pid=1) ERROR 10-20 13:00:06 [async_llm.py:906] AsyncLLM output_handler failed.
(APIServer pid=1) ERROR 10-20 13:00:06 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: Engine
INFO:     Application shutdown complete.
"""
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
    assert "lines above" not in " ".join(row.remedy for row in load_catalogue().failures)


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
    command = [sys.executable, "-m", "kimi_k3", "doctor", "--log", "-"]
    text = b"\xff\0" * 1000 + b"\n" + LLVM.encode()
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    assert done.returncode == 0
    assert f"line 2: {LLVM}" in done.stdout.decode()
    assert done.stderr == b""


def test_what_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A FIFO would be waited for, and a directory has no lines."""
    os.mkfifo(tmp_path / "fifo")
    packed = tmp_path / "oom.log.zst"
    packed.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(50))
    for path, part in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "it is a directory"),
        (tmp_path / "fifo", "it is a FIFO"),
        (Path("/dev/zero"), "it is a device"),
        (packed, "it is compressed with zstd; decompress it first"),
        (Path(sys.executable), "it is not text"),
    ):
        assert run(["doctor", "--log", str(path)]) == 6
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
        (["--log", "a", "--log", "b"], 2, "--log is given twice: a, b; join the parts: cat "),
        (["--state", "a", "--state-dir", "b"], 2, "--state is given twice: a, b; "),
        (["--exit-code", "1", "--exit-code", "0"], 2, "--exit-code is given twice: 1, 0; "),
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
    said = " ".join(capsys.readouterr().out.split())
    for part in (
        "0: a cause was found, or nothing failed",
        "; 1: unknown; 2: ",
        "; 6: the log or the state directory",
    ):
        assert part in said


def ended(state: Path, explanation: Explanation | None) -> None:
    ending = Ending(at=NOW, exit_code=7, reason="vLLM failed; read on", explanation=explanation)
    write_record(
        state, "supervisor.json", supervisor(ending=ending, engine_pid=5, phases=phases(Phase.FAILED))
    )


def phases(*names: Phase) -> tuple[PhaseChange, ...]:
    return tuple(PhaseChange(phase=name, at=NOW) for name in names)


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


def serving(state: Path, *, ending: Ending | None = None, **changes: object) -> None:
    """A record of a start that served, and a log as vLLM 0.32.0 prints it."""
    names = (Phase.LOADING, Phase.READY) if ending is None else (Phase.READY, Phase.DRAINING, Phase.STOPPED)
    record: dict[str, object] = {
        "engine_pid": 5,
        "phases": phases(*names),
        "ending": ending,
        "updated_at": now(),
    }
    write_record(state, "supervisor.json", supervisor(**{**record, **changes}))
    (state / "engine.log").write_text(
        STOPPED if ending else STOPPED[: STOPPED.index("(APIServer pid=1) INFO 10-20 13")]
    )


@pytest.mark.parametrize(
    ("code", "reason"), [(0, "SIGTERM while serving"), (143, "SIGTERM during the start")]
)
def test_an_end_on_request_is_no_failure(
    code: int, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rollout ends so, and vLLM logs an EngineDeadError each time."""
    serving(tmp_path, ending=Ending(at=NOW, exit_code=code, reason=reason))
    assert run(["doctor", "--state", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"ended on request, no failure: {reason}\n" in out
    for part in ("unknown", "error line", "also seen", "cause: ", "not visible"):
        assert part not in out
    assert "noticed: slow-load (line 2): " in out


def test_a_start_that_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing known is not the same as something unknown that is wrong."""
    serving(tmp_path)
    assert run(["doctor", "--state", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["outcome"], report["found"]) == ("running", False)
    assert report["why"] == "serving; nothing is known to be wrong"
    serving(tmp_path, phases=phases(Phase.LOADING))
    assert run(["doctor", "--state", str(tmp_path)]) == 0
    assert "\nrunning, phase loading; nothing is known to be wrong\n" in capsys.readouterr().out


def test_a_start_whose_supervisor_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A node that ran out of memory leaves a record that says 'ready'."""
    serving(tmp_path, updated_at=NOW)
    assert run(["doctor", "--state", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "unknown: " in out
    assert "note: the supervisor is gone without an ending" in out


def test_a_failure_while_serving_comes_before_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever ends an engine that hangs wants to know why it did."""
    serving(tmp_path, ending=Ending(at=NOW, exit_code=0, reason="SIGTERM while serving"))
    at = STOPPED.index("(APIServer pid=1) INFO 10-20 13")
    (tmp_path / "engine.log").write_text(f"{STOPPED[:at]}{LLVM}\n{STOPPED[at:]}")
    assert run(["doctor", "--state", str(tmp_path)]) == 0
    assert "cause: a FlyDSL" in capsys.readouterr().out


def test_the_log_of_an_earlier_start_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A start that a check ended leaves the log of the one before where it was."""
    ending = Ending(at=NOW, exit_code=5, reason="port 8000 is in use; end it")
    write_record(tmp_path, "supervisor.json", supervisor(ending=ending, phases=phases(Phase.FAILED)))
    (tmp_path / "engine.log").write_text(LLVM)
    assert run(["doctor", "--state", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "exit code 5: port 8000 is in use" in out
    assert "vLLM was not started" in out
    assert "FlyDSL" not in out
    assert "note: of an earlier start: " in out


def test_notices_are_no_cause(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine that served and ended well was at most slow."""
    log.write_text(STOPPED)
    for extra in ([], ["--exit-code", "0"]):
        assert run(["doctor", "--log", str(log), *extra]) == 0
        out = capsys.readouterr().out
        assert "cause: " not in out
        assert ("ended on request, no failure: " in out) is (extra == [])
        assert "noticed: slow-load" in out
    log.write_text(STOPPED.splitlines()[1])
    assert run(["doctor", "--log", str(log)]) == 1
    assert "noticed: slow-load" in capsys.readouterr().out


def test_exit_code_0_against_the_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a pipe into tee it is tee's; what it silences is said."""
    log.write_text(f"{OUT_OF_MEMORY}\n")
    assert run(["doctor", "--log", str(log), "--exit-code", "0"]) == 1
    out = capsys.readouterr().out
    assert "unknown: exit code 0 says that the engine ended well, and " in out
    assert "set aside because of exit code 0: device-out-of-memory (line 1): " in out
    assert "PIPESTATUS" in out
    assert run(["doctor", "--exit-code", "0"]) == 0
    assert "no failure: exit code 0 says" in capsys.readouterr().out


def test_two_sources_are_told_apart(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ending of one start beside the cause of another reads as one story."""
    state = tmp_path / "state"
    state.mkdir()
    ended(state, None)
    assert run(["doctor", "--state", str(state), "--log", str(log)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"note: the ending is from --state {state}, what is said of a log from --log {log}"


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("by_pipe", [False, True])
def test_compressed_logs(
    compress: Callable[[bytes], bytes],
    by_pipe: bool,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What logrotate leaves is what there is of last night."""
    log.write_bytes(compress(log.read_bytes()))
    with log.open("rb") as stream:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        assert run(["doctor", "--log", "-" if by_pipe else str(log)]) == 0
    assert f"line 2: {LLVM}" in capsys.readouterr().out


def test_a_part_of_a_compressed_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The part that is whole may hold the cause, and says that it is a part."""
    data = gzip.compress(f"{LLVM}\n".encode() + os.urandom(9000).hex().encode())
    log.write_bytes(data[:-2000])
    assert run(["doctor", "--log", str(log)]) == 0
    assert f"note: only a part of {log} could be read: the gzip data ends early" in capsys.readouterr().out
    log.write_bytes(data[:12])
    assert run(["doctor", "--log", str(log)]) == 6
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("GET / 200\n", "does not look like vLLM's log"),
        ("", "is empty; catch vLLM's standard error, too"),
    ],
)
def test_a_wrong_file_is_told(text: str, part: str, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commonest reason why nothing is found."""
    log.write_text(text)
    assert run(["doctor", "--log", str(log)]) == 1
    assert part in capsys.readouterr().out


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A state directory that this process may see but not look into, though it be root's."""
    top = Path(tempfile.mkdtemp())
    state = top / "state"
    state.mkdir()
    (state / "engine.log").write_text(LLVM)
    top.chmod(0o755)
    state.chmod(0)
    before = os.geteuid()
    try:
        if before == 0:
            os.seteuid(65534)
        yield state
    finally:
        os.seteuid(before)
        state.chmod(0o700)
        shutil.rmtree(top)


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
def test_another_users_files_are_one_line(
    mode: int, foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Services run as a user of their own, whose directory is closed to the one who asks."""
    with as_owner():
        foreign.chmod(mode)
        (foreign / "engine.log").chmod(0)
    for option, path in (("--state", foreign), ("--log", foreign / "engine.log")):
        assert run(["doctor", option, str(path)]) == 6
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"kimi-k3: error: {option} {foreign}")
        assert err.endswith("Permission denied; ask as the user who started it, or as root\n")


def test_another_users_journal(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record that cannot be read is not the same as none."""
    with as_owner():
        foreign.chmod(0o755)
        (foreign / "engine.log").unlink()
        (foreign / "supervisor.json").write_text("{}")
        (foreign / "supervisor.json").chmod(0)
    assert run(["doctor", "--state", str(foreign)]) == 6
    assert "supervisor.json: cannot be read: Permission denied; " in capsys.readouterr().err


@contextlib.contextmanager
def as_owner() -> Iterator[None]:
    """Undo for a moment what the fixture does to root."""
    now_is = os.geteuid()
    os.seteuid(os.getuid())
    try:
        yield
    finally:
        os.seteuid(now_is)
