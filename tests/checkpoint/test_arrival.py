# SPDX-License-Identifier: Apache-2.0
"""Waiting for a checkpoint: no sooner than it can be served, and never silently."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from kimi_k3.checkpoint import make_tiny_checkpoint
from kimi_k3.checkpoint.arrival import wait_for_checkpoint
from kimi_k3.errors import ExitCode, OperatorError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A whole checkpoint."""
    make_tiny_checkpoint(tmp_path / "source")
    return tmp_path / "source"


def test_file_by_file(source: Path, tmp_path: Path) -> None:
    """Each line says how far it is; the last file ends the waiting."""
    to, told = tmp_path / "to", list[str]()
    to.mkdir()
    more = threading.Event()

    def report(line: str) -> None:
        told.append(line)
        more.set()

    waiting = threading.Thread(
        target=lambda: wait_for_checkpoint(to, seconds=60, report=report, pause=0.01), daemon=True
    )
    waiting.start()
    for name in (
        "model.safetensors.index.json",
        *(f"model-0000{number}-of-000003.safetensors" for number in (1, 2, 3)),
        "config.json",
    ):
        assert more.wait(30)
        more.clear()
        shutil.copy(source / name, to / "incoming")
        (to / "incoming").rename(to / name)
    for path in source.iterdir():
        shutil.copy(path, to)
    waiting.join(30)
    assert not waiting.is_alive()
    assert told[0].endswith("no index yet")
    assert [line.split(": ")[1].split(",")[0] for line in told[1:4]] == [
        f"{number} of 3 shards" for number in range(3)
    ]
    assert "has no config.json" in told[4]


def test_the_commit_before(source: Path) -> None:
    """Files of another commit, which a download is replacing, are not waited past: they would be mixed."""
    commit, other = 40 * "a", 40 * "b"
    notes = source / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    named = [*source.glob("*.safetensors"), source / "model.safetensors.index.json"]
    for path in named:
        (notes / f"{path.name}.metadata").write_text(f"{commit}\ntag\n1.0\n")
    wait_for_checkpoint(source, seconds=0, report=print, revision=commit)
    (notes / f"{named[0].name}.metadata").write_text(f"{other}\ntag\n1.0\n")
    (notes / f"{named[1].name}.metadata").unlink()
    with pytest.raises(OperatorError, match=f"2 of 4 files are not of {commit} yet"):
        wait_for_checkpoint(source, seconds=0, report=print, revision=commit)


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_not_in_time(source: Path, damage: str) -> None:
    """What is not there yet, or not whole, is no checkpoint; the error says which."""
    shard = source / "model-00002-of-000003.safetensors"
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    told: list[str] = []
    with pytest.raises(OperatorError) as refused:
        wait_for_checkpoint(source, seconds=0.05, report=told.append, pause=0.01)
    assert refused.value.exit_code is ExitCode.BAD_CHECKPOINT
    assert len(told) == 1, "the same is not said twice"
    assert ("2 of 3 shards" if damage == "missing" else shard.name) in str(refused.value)


def test_a_damaged_index(source: Path) -> None:
    """It is told, and waited for: a download may be in the middle of it."""
    (source / "model.safetensors.index.json").write_text("{")
    told: list[str] = []
    with pytest.raises(OperatorError, match="is not complete after 0 s"):
        wait_for_checkpoint(source, seconds=0, report=told.append)
    assert "is damaged" in told[0]
