# SPDX-License-Identifier: Apache-2.0
"""The directory of the results: whose it is, what may be in it, and what a broken run leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_k3.cli.application import run
from kimi_k3.errors import OperatorError
from kimi_k3.terminal import Terminated
from kimi_k3.verify.keeping import held, kept, read_results
from kimi_k3.verify.results import Kind, Subject
from tests.surroundings import SURROUNDINGS
from tests.verify.openai_server import silent, until

COMMAND = (sys.executable, "-m", "kimi_k3", "verify")
SUBJECT = Subject(engine="")
FOREIGN = {
    "empty, as a power cut leaves it": "",
    "truncated": '{"schema_version": 1, "kind": "bench"',
    "another version": '{"schema_version": 2, "kind": "bench"}',
    "another program's": '{"completed": 10, "failed": 0}',
    "a list": "[]",
}


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("command", ["accuracy", "bench"])
def test_what_is_no_result_is_neither_overwritten_nor_found_at_the_end(
    text: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Known before anybody is asked, whichever verification it is: later the work would have no report."""
    (tmp_path / "bench.json").write_text(text)
    asked = ["verify", command, "--no-sidecar", "--engine", "http://127.0.0.1:1", "--out", str(tmp_path)]
    assert run(asked) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "bench.json: is no result of this version" in line
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    assert (tmp_path / "bench.json").read_text() == text


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    """They would take each other's files for their own; the second says so, the first is not disturbed."""
    with silent() as server:
        first = subprocess.Popen(
            [*COMMAND, "accuracy", "--no-sidecar", "--engine", server.url, "--out", str(tmp_path)],
            env=SURROUNDINGS,
            stdout=subprocess.DEVNULL,
        )
        try:
            until(lambda: bool(server.asked))
            with pytest.raises(OperatorError, match="another verification writes into it"), held(tmp_path):
                raise AssertionError
            assert read_results(tmp_path)[0].broken_off is None
        finally:
            first.kill()
            first.wait()
    with held(tmp_path):
        """Free again, though it was killed."""


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """Said at once and by its name, not by what first wanted to write."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(OperatorError, match=r"--out .*file/out: Not a directory"),
        held(tmp_path / "file/out"),
    ):
        raise AssertionError


def test_a_run_that_asked_nobody_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No empty directory, and no word of a report beside the error."""
    out = tmp_path / "out"
    asked = ["verify", "accuracy", "--no-sidecar", "--engine", "http://127.0.0.1:1", "--out", str(out)]
    assert run(asked) == 1
    assert capsys.readouterr().out == ""
    assert not out.exists()


def test_an_earlier_result_outlives_a_server_that_does_not_answer(tmp_path: Path) -> None:
    """What was measured yesterday is worth more than that somebody mistyped a URL today."""
    for kind in (Kind.ACCURACY, Kind.BENCH, Kind.LONG, Kind.GSM8K):
        with kept(tmp_path, kind, SUBJECT, {}):
            """Measured yesterday."""
        before = read_results(tmp_path)
        asked = ["--no-sidecar", "--engine", "http://127.0.0.1:1", "--out", str(tmp_path)]
        assert run(["verify", kind, *asked, *(["--own"] if kind is Kind.GSM8K else [])]) == 1
        assert read_results(tmp_path) == before


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (KeyboardInterrupt(), "interrupted from the keyboard"),
        (Terminated(signal.SIGTERM), "ended by SIGTERM"),
        (OperatorError("the disk is full", remedy="free some space"), "the disk is full; free some space"),
        (ValueError("x"), "ValueError: x"),
    ],
)
def test_why_a_run_was_broken_off_is_told_in_words(error: BaseException, why: str, tmp_path: Path) -> None:
    """The report's reader knows no names of exceptions; a mistake of ours keeps its own."""
    with pytest.raises(type(error)), kept(tmp_path, Kind.LONG, SUBJECT, {}):
        raise error
    assert read_results(tmp_path)[0].broken_off == why


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do, though the error in the error wants to write, too."""

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    def fill() -> None:
        with kept(tmp_path, Kind.LONG, SUBJECT, {}) as sheet:
            monkeypatch.setattr("kimi_k3.verify.keeping.write_record", full)
            sheet.note(rows=[])

    with pytest.raises(OperatorError, match=r"cannot write long.json: No space left"):
        fill()
