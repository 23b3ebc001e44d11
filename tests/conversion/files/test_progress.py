# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 convert-report`` goes on where it was stopped, and never with the figures of another report."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_k3.cli import run

from .reports import LAYERS, reported

pytestmark = pytest.mark.usefixtures("own_cache")


def test_resumes_after_being_killed(
    tiny: Path, tmp_path: Path, partial: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report of the published size takes long, and a node may be taken away at any moment."""
    expected = tmp_path / "expected.json"
    reported(tiny, expected)
    capsys.readouterr()
    reported(tiny, tmp_path / "r.json")
    err = capsys.readouterr().err
    assert f"5 of 14 projections are known from {partial}" in err
    assert err.count(": relative MSE ") == LAYERS
    assert (tmp_path / "r.json").read_bytes() == expected.read_bytes()
    assert not partial.exists()


def test_resumes_without_a_json_file(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who only looks at the table must not lose hours either."""
    _run_and_die(tiny, [], after=5, by=signal.SIGKILL)
    (kept,) = (tmp_path / "cache" / "kimi-k3").iterdir()
    assert run(["convert-report", str(tiny)]) == 0
    assert f"5 of 14 projections are known from {kept}" in capsys.readouterr().err
    assert not kept.exists()


def test_ctrl_c_says_how_to_go_on(tiny: Path, tmp_path: Path) -> None:
    """One line, the usual exit code, and the work that is done is kept."""
    done = _run_and_die(tiny, ["--json", str(tmp_path / "r.json")], after=3, by=signal.SIGINT)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == (
        f"kimi-k3: interrupted; run the same command again to continue from {tmp_path / 'r.json.partial'}"
    )
    assert len((tmp_path / "r.json.partial").read_text().splitlines()) == 1 + 3


def test_a_shard_that_was_replaced_is_measured_again(tiny: Path, tmp_path: Path) -> None:
    """The remedy for a damaged group is a new shard, and a report of the old one would be untrue."""
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    _run_and_die(copy, ["--json", str(tmp_path / "r.json")], after=9, by=signal.SIGKILL)
    whole = tmp_path / "whole.json"
    reported(copy, whole)
    for shard in copy.glob("*-00001-of-*.safetensors"):
        os.utime(shard, ns=(1, 1))
    done = subprocess.run(
        [sys.executable, "-m", "kimi_k3", "convert-report", copy, "--json", tmp_path / "r.json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "projections are measured again: their shards have changed" in done.stderr
    assert "of 14 projections are known" in done.stderr
    assert (tmp_path / "r.json").read_bytes() == whole.read_bytes()


def test_a_reader_that_goes_away(tiny: Path, tmp_path: Path) -> None:
    """``| head -1`` is no failure: the JSON is whole, and nothing of the progress stays behind."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "kimi_k3", "convert-report", tiny, "--json", tmp_path / "r.json"],
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert done.returncode == 141
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["r.json"]


def _run_and_die(
    checkpoint: Path, flags: list[str], *, after: int, by: signal.Signals
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that gets a signal when so many projections are finished."""
    code = f"""
import os, sys
from kimi_k3.cli import main
from kimi_k3.conversion.files.progress import ProgressFile
append, count = ProgressFile.append, 0
def append_and_die(self, part, shards):
    global count
    append(self, part, shards)
    count += 1
    if count == {after}:
        os.kill(os.getpid(), {int(by)})
ProgressFile.append = append_and_die
sys.argv[1:] = {["convert-report", str(checkpoint), *flags]!r}
main()
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def left_behind(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The progress of a report that was killed after five projections."""
    directory = tmp_path_factory.mktemp("killed")
    killed = _run_and_die(tiny, ["--json", str(directory / "r.json")], after=5, by=signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in directory.iterdir()] == ["r.json.partial"]
    return (directory / "r.json.partial").read_bytes()


@pytest.fixture
def partial(tmp_path: Path, left_behind: bytes) -> Path:
    """The same, where a report to ``r.json`` looks for it."""
    path = tmp_path / "r.json.partial"
    path.write_bytes(left_behind)
    return path


@pytest.mark.parametrize("cut", [1, 40, 100_000])
def test_a_half_written_line(
    tiny: Path, tmp_path: Path, partial: Path, capsys: pytest.CaptureFixture[str], cut: int
) -> None:
    """Killed while it wrote, even the first line: what is whole counts, the rest is said and done again."""
    raw = partial.read_bytes()
    partial.write_bytes(raw[: max(20, len(raw) - cut)])
    reported(tiny, tmp_path / "r.json")
    err = capsys.readouterr().err
    assert ("4 of 14" in err) == (cut < 100_000)
    assert ("half-written and are ignored" in err) == (cut < 100_000)
    assert not partial.exists()


def test_damage_inside_the_progress(
    tiny: Path, tmp_path: Path, partial: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that is none ends what can be trusted, and the report is right all the same."""
    lines = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(b"".join([*lines[:3], b"{}\n", *lines[3:]]))
    report = reported(tiny, tmp_path / "r.json")
    assert "2 of 14 projections" in capsys.readouterr().err
    assert report == reported(tiny, tmp_path / "again.json")


@pytest.mark.parametrize(("flags", "known", "kept"), [([], True, False), (["--layers", "5-7"], False, True)])
def test_progress_of_the_same_report(
    tiny: Path,
    tmp_path: Path,
    partial: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    known: bool,
    kept: bool,
) -> None:
    """A report of a few layers must not throw away what hours have found out about the others."""
    before = partial.read_bytes()
    reported(tiny, tmp_path / "r.json", *flags)
    assert (" projections are known from " in capsys.readouterr().err) == known
    assert partial.exists() == kept
    assert not kept or partial.read_bytes().startswith(before)


@pytest.mark.parametrize("flags", [["--rule", "amax"], ["--no-negative-scale"]])
def test_progress_of_another_report(
    tiny: Path, tmp_path: Path, partial: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    """Figures of two rules must never be mixed, and a forgotten flag must not cost hours."""
    before = partial.read_bytes()
    command = ["convert-report", str(tiny), "--json", str(tmp_path / "r.json"), *flags]
    assert run(command) == 2
    assert "holds 5 projections of another report (" in capsys.readouterr().err
    assert partial.read_bytes() == before
    assert run([*command, "--no-resume"]) == 0
    assert not partial.exists()


def test_progress_of_another_checkpoint(
    tiny: Path, tmp_path: Path, partial: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two checkpoints of one architecture have the same headers, so the place where they lie counts."""
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    assert run(["convert-report", str(copy), "--json", str(tmp_path / "r.json")]) == 2
    assert f"another report (directory {tiny})" in capsys.readouterr().err


def test_a_file_that_is_no_progress_file(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever has that name by chance is somebody's."""
    other = tmp_path / "r.json.partial"
    other.write_text("a download")
    assert run(["convert-report", str(tiny), "--json", str(tmp_path / "r.json")]) == 2
    assert f"{other} is no progress file of convert-report; it is left alone; " in capsys.readouterr().err
    assert other.read_text() == "a download"
    other.unlink()
    os.mkfifo(other)
    assert run(["convert-report", str(tiny), "--json", str(tmp_path / "r.json")]) == 2


def test_two_at_a_time(tiny: Path, tmp_path: Path, partial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two writers of one progress file would each delete the other's."""
    with partial.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run(["convert-report", str(tiny), "--json", str(tmp_path / "r.json")]) == 5
    assert f"{partial} is in use by another convert-report; " in capsys.readouterr().err


def test_places_that_cannot_be_written(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said at once, not after hours."""
    assert run(["convert-report", str(tiny), "--json", str(tmp_path / "no" / "r.json")]) == 2
    assert f"there is no directory {tmp_path / 'no'}; " in capsys.readouterr().err
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run(["convert-report", str(tiny)]) == 1
    error = capsys.readouterr().err
    assert (
        f"{tmp_path / 'file' / 'kimi-k3'} cannot be made to keep the progress in (Not a directory)" in error
    )
    assert "set XDG_CACHE_HOME" in error


@pytest.mark.parametrize("limit", [100, 700])
def test_a_disk_that_is_full(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: int
) -> None:
    """In the header of the progress or in a record: one line, and once there is space it goes on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        assert run(["convert-report", str(tiny), "--json", str(tmp_path / "r.json")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    message = f"{tmp_path / 'r.json.partial'} cannot be written (File too large); free some space"
    assert message in capsys.readouterr().err
    reported(tiny, tmp_path / "r.json")


def test_a_report_that_cannot_be_printed_is_not_lost(tiny: Path, tmp_path: Path) -> None:
    """A full standard output comes last, so the next run has only to print."""
    command = [sys.executable, "-m", "kimi_k3", "convert-report", str(tiny)]
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(command, stdout=full, stderr=subprocess.DEVNULL, check=False).returncode == 1
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "14 of 14 projections are known" in done.stderr
