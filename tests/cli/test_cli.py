# SPDX-License-Identifier: Apache-2.0
"""The command line's own behaviour: one line for every mistake, and quick help."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path

import pytest

from kimi_k3 import __version__
from kimi_k3.checkpoint import make_tiny_checkpoint
from kimi_k3.cli import run
from kimi_k3.plan.overrides import WHY
from kimi_k3.preflight import device
from tests.surroundings import SURROUNDINGS


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
        (["serve", ""], 2, "unset shell variable"),
        (["serve", "x", "--state-dir", ""], 2, "--state-dir: is empty"),
        (["serve", "x", "--api-key-file", ""], 2, "--api-key-file: is empty"),
        (["sidecar", "--state-dir", ""], 2, "--state-dir: is empty"),
        (["checkpoint", "show", ""], 2, "unset shell variable"),
        (["checkpoint", "make", ""], 2, "unset shell variable"),
        (["serve", "~no-such-user/x"], 2, "no home directory"),
        (["serve", "x", "--state-dir", "~no-such-user/x"], 2, "no home directory"),
        (["serve", "x", "--api-key-file", "~no-such-user/x"], 2, "no home directory"),
        (["checkpoint", "show", "~no-such-user/x"], 2, "no home directory"),
        (["serve", "x\udcff", "--dry-run"], 2, "checkpoint 'x\\udcff': is not UTF-8"),
        (["serve", "x", "--state-dir", "x\udcff", "--dry-run"], 2, "--state-dir 'x\\udcff': is not UTF-8"),
        (["serve", "x", "--host", "x\udcff", "--dry-run"], 2, "--host 'x\\udcff': is not UTF-8"),
        (["serve", "x", "--served-model-name", "x\udcff", "--dry-run"], 2, "is not UTF-8"),
        (["serve", "x", "--start-timeout", "1e10", "--dry-run"], 2, "7 days"),
        (
            ["serve", "x", "--profile", "cpu-tiny", "--wait-vram", "1", "--dry-run"],
            2,
            "--wait-vram has no effect with profile cpu-tiny",
        ),
        (["serve", "x", "--profile", "ep8", "--wait-vram", "-1"], 2, "--wait-vram -1"),
        (["preflight", "--image", "--wait-vram", "1"], 2, "--wait-vram with --image"),
        (["preflight", "--profile", "ep9"], 2, "there is no such profile"),
        (["preflight", "--weights", "int5"], 2, "did you mean 'int4'?"),
        (["preflight", ""], 2, "unset shell variable"),
        (["preflight", "--image", "--port", "1"], 2, "--port with --image"),
        (["preflight", "--port", "0"], 2, "--port 0: is not a port"),
        *(
            ([command, "x", *arguments], 2, part)
            for command in ("serve", "preflight", "plan")
            for arguments, part in (
                (["--set", "max-model-length=1"], "did you mean 'max-model-len'?"),
                (["--set", "max-model-len=8", "--max-model-len", "9"], "--max-model-len is given, too"),
                (["--profile", "ep8", "--set", "gpu-memory-utilization=1"], "at most 0.97"),
            )
        ),
        (["serve", "x", "--profile", "pp2-tp8", "--accept-lossy"], 2, "--node-rank is missing"),
        (["serve", "x", "--profile", "ep8", "--node-rank", "0", "--accept-lossy"], 2, "is for one node"),
        (["convert-report", "/no/such/dir"], 4, "/no/such/dir"),
        (["convert-report", "/no/such/dir", "--layers", "1"], 4, "/no/such/dir"),
        (["convert-report", "x", "--rule", "msee"], 2, "did you mean 'mse'?"),
        (["convert-report", "x", "--json", ""], 2, "--json: is empty"),
        (["convert-report", "x", "--json", "/no/such/dir/file"], 2, "there is no directory /no/such/dir"),
        (["convert-report", "x", "--no-resum"], 2, "did you mean '--no-resume'?"),
        (["convert-file", "x", "y", "--layout", "plain"], 2, "--rule"),
        (["convert-file", "x", "y", "--rule", "mse"], 2, "--layout"),
        (["convert-file", "x", "y", "--rule", "ams", "--layout", "plain"], 2, "--rule 'ams'"),
        (["convert-file", "x", "y", "--rule", "mse", "--layout", "aitr"], 2, "did you mean 'aiter'?"),
        (
            ["convert-file", "x", "y", "--rule", "mse", "--layout", "plain", "--device", "rocm"],
            2,
            "cpu, cuda",
        ),
        (["convert-file", "/no/such/file", "y", "--rule", "mse", "--layout", "plain"], 1, "/no/such/file"),
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


@pytest.mark.parametrize(("kfd", "profile"), [(True, "ep8"), (False, "cpu-tiny")])
def test_the_profile_that_nobody_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kfd: bool, profile: str
) -> None:
    """What ``preflight`` checked is what ``serve`` starts; an image says nothing of the machine to come."""
    monkeypatch.setattr(
        device, "usual_profile", partial(device.usual_profile, kfd=Path("/dev/null" if kfd else "/no"))
    )
    for arguments, expected in (([], profile), (["--image"], "ep8")):
        run(["preflight", "--json", *arguments])
        assert json.loads(capsys.readouterr().out)["profile"] == expected
    # Only one of them has something to wait for, and the error says which one is meant.
    run(["serve", "/no/such/dir", "--wait-vram", "1", "--accept-lossy"])
    assert ("has no effect with profile cpu-tiny" in capsys.readouterr().err) is not kfd


def test_what_was_planned_can_be_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same words change the same flags, and the dry run shows them with who wanted them."""
    make_tiny_checkpoint(tmp_path / "tiny")
    settings = ["--profile", "cpu-tiny", "--set", "max-model-len=512", "--set", "max-num-seqs=3"]
    assert run(["plan", str(tmp_path / "tiny"), *settings, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["argv"]
    assert run(["serve", str(tmp_path / "tiny"), *settings, "--dry-run"]) == 0
    script = capsys.readouterr().out
    for flag, value in (("--max-model-len", "512"), ("--max-num-seqs", "3")):
        assert planned[planned.index(flag) + 1] == value
        assert f" {flag} {value} " in script
        assert f"# {flag}: {WHY}" in script


def test_a_bad_consent_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``yes`` could be meant either way, so it is neither."""
    monkeypatch.setenv("KIMI_K3_ACCEPT_LOSSY", "yes")
    assert run(["serve", "x", "--weights", "int4"]) == 2
    assert "KIMI_K3_ACCEPT_LOSSY" in capsys.readouterr().err


def test_a_misspelled_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``serve`` looks at all of ours before anything else; other commands have no use for them."""
    monkeypatch.setenv("KIMI_K3_ACCEPT_LOSY", "1")
    assert run(["serve", "x", "--dry-run"]) == 2
    assert "did you mean 'KIMI_K3_ACCEPT_LOSSY'?" in capsys.readouterr().err
    assert run(["version"]) == 0


def test_make_then_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny checkpoint is whole; without a shard the exit code is 4, for people and programs."""
    directory = tmp_path / "tiny"
    assert run(["checkpoint", "make", str(directory), "--seed", "1"]) == 0
    assert run(["checkpoint", "show", str(directory)]) == 0
    assert "shards: 3 ok" in capsys.readouterr().out
    sorted(directory.glob("*.safetensors"))[0].unlink()
    assert run(["checkpoint", "show", str(directory), "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["servable"] is False


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Only the number, for scripts; many try the option first."""
    assert run(arguments) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("group", [[], ["checkpoint"], ["kernels"], ["metrics"], ["verify"]])
def test_a_list_of_commands_cuts_no_sentence_off(
    group: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a sentence and three dots do not tell which command one wants."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*group, "--help"]) == 0
    told = capsys.readouterr().out
    assert "..." not in told.replace("[ARGS]...", "")
    assert max(map(len, told.splitlines())) <= 80


def test_an_interrupt_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A run of minutes that ends without a word looks like one that crashed."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kimi_k3.verify.report.write_report", interrupted)
    assert run(["verify", "report", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "kimi-k3: interrupted\n"


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    """Half a second is what one waits without noticing; the modules are what keeps it so."""
    heavy = "{'torch', 'vllm', 'pydantic', 'httpx', 'fastapi', 'rich', 'numpy', 'yaml'}"
    code = f"import sys, kimi_k3.cli as c; c.run(['--help']); print(sorted({heavy} & set(sys.modules)))"
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    # Twice the promise: the machine that tests may be busy.
    assert time.monotonic() - begun < 1.0


def test_the_command_begins_where_nothing_is_imported_yet() -> None:
    """A Ctrl-C meets the handler instead of an import."""
    entry = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert entry == {"kimi-k3": "kimi_k3.__main__:main"}
    code = "import sys, kimi_k3.__main__; print(sorted({'typer', 'click', 'kimi_k3.cli'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("signals", [1, 3])
def test_an_interrupt_while_the_command_is_imported(tmp_path: Path, signals: int) -> None:
    """Nothing has begun, so nothing is to be told, least of all where in an import it was."""
    interrupting = f"import os, signal\nfor _ in range({signals}):\n os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "typer.py").write_text(interrupting)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from kimi_k3.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_while_a_command_imports_its_room(tmp_path: Path) -> None:
    """pydantic makes a traceback of it, and whatever catches all exceptions forgets it."""
    (tmp_path / "yaml.py").write_text(
        "import os, signal\ntry:\n os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: pass\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from kimi_k3.__main__ import main; main()"
    command = [sys.executable, "-c", code, "doctor", "--exit-code", "-9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_ignored_interrupt_stays_ignored() -> None:
    """A background job of a script is not what Ctrl-C is for."""
    code = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "import kimi_k3.cli.application as cli;"
        "cli.run = lambda arguments: os.kill(os.getpid(), signal.SIGINT) or 7;"
        "from kimi_k3.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")


def test_an_interrupt_after_the_imports_ends_the_command() -> None:
    """Whatever it is at may have to be cleaned up, so from there on it is an exception again."""
    code = (
        "import os, signal, kimi_k3.cli.application as cli;"
        "cli.run = lambda arguments: os.kill(os.getpid(), signal.SIGINT);"
        "from kimi_k3.__main__ import main; import atexit; atexit.register(print, 'cleaned'); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned\n", "")


def test_the_supervisor_imports_neither_torch_nor_vllm() -> None:
    """All checks together take less than three seconds, which their imports alone would exceed."""
    code = "import sys, kimi_k3.supervisor.serve; print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("module", ["npz", "report"])
def test_the_commands_of_the_conversion_import_no_torch(module: str) -> None:
    """They run on machines without an engine, and torch alone takes seconds and 200 MB."""
    name = f"kimi_k3.conversion.files.{module}"
    code = f"import sys, {name}; print(sorted({{'torch', 'vllm'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_without_numpy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The package itself does not bring it, and a traceback would not say what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(["convert-report", "x"]) == 1
    assert "convert-report needs numpy and numba, not installed here; " in capsys.readouterr().err


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    """``kimi-k3 checkpoint show | head -1`` is not an error worth a traceback."""
    run(["checkpoint", "make", str(tmp_path / "tiny")])
    script = f"{sys.executable} -m kimi_k3 checkpoint show {tmp_path / 'tiny'} | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""


FULL = "kimi-k3: error: standard output: No space left on device; free some space or send it elsewhere\n"


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        ("version >&-", 0, ""),
        ("version <&- >&- 2>&-", 0, ""),
        ("checkpoint show tiny >&-", 0, ""),
        ("checkpoint show nope >&-", 4, None),
        ("version >/dev/full", 1, FULL),
        ("--help >/dev/full", 1, FULL),
        ("checkpoint show tiny >/dev/full", 1, FULL),
        ("checkpoint show tiny --json >/dev/full", 1, FULL),
        ("checkpoint show nope >/dev/full", 4, None),
        ("checkpoint show nope 2>/dev/full", 4, ""),
        ("checkpoint show nope 2>&-", 4, ""),
        ("version >/dev/full 2>/dev/full", 1, ""),
        ("version 2>/dev/full", 0, ""),
    ],
)
def test_streams_that_are_closed_or_full(tmp_path: Path, command: str, code: int, error: str | None) -> None:
    """A closed output is nobody's mistake, a full one is an error, and no exit code hangs on stderr."""
    run(["checkpoint", "make", str(tmp_path / "tiny")])
    script = f"{sys.executable} -m kimi_k3 {command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == code
    if error is None:
        assert done.stderr.startswith("kimi-k3: error: checkpoint ")
        assert done.stderr.count("\n") == 1
    else:
        assert done.stderr == error


def test_text_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    """Names in a checkpoint come from anywhere; an ASCII terminal gets them as escapes."""
    environment = {**SURROUNDINGS, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "kimi_k3", "checkpoint"]
    for arguments, code in (
        (["make", "gr\u00f6\u00dfe"], 0),
        (["show", "gr\u00f6\u00dfe"], 0),
        (["show", "\u00f6"], 4),
    ):
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )
        assert done.returncode == code, done.stderr
        assert "\\xf6" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
