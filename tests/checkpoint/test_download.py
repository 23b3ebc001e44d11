# SPDX-License-Identifier: Apache-2.0
"""A checkpoint from a hub: whole, at one commit, and never fetched twice."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kimi_k3.checkpoint import make_tiny_checkpoint
from kimi_k3.checkpoint.download import download_checkpoint
from kimi_k3.errors import ExitCode, OperatorError
from tests.checkpoint.hub import COMMIT, REPOSITORY, Hub, running_hub
from tests.surroundings import SURROUNDINGS

SHARD = "model-00002-of-000003.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What the hub has."""
    make_tiny_checkpoint(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def hub(source: Path) -> Iterator[Hub]:
    """A hub with the tiny checkpoint."""
    with running_hub(source) as running:
        yield running


def begun(hub: Hub, to: Path, *further: str) -> subprocess.Popen[str]:
    """The command, in the surroundings of a container: the client reads its variables when it is imported."""
    command = [sys.executable, "-m", "kimi_k3", "checkpoint", "download", REPOSITORY, str(to)]
    return subprocess.Popen(
        [*command, *(further or ("--revision", COMMIT))],
        env={**SURROUNDINGS, "HF_ENDPOINT": hub.url, "HF_HOME": str(to.parent / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_whole_and_only_once(hub: Hub, source: Path, tmp_path: Path) -> None:
    """Byte for byte what the hub has; the second time nothing is fetched."""
    child = begun(hub, tmp_path / "to")
    out, error = child.communicate(timeout=120)
    assert child.returncode == 0, error
    assert "is complete: 3 shards" in out
    for path in source.iterdir():
        assert (tmp_path / "to" / path.name).read_bytes() == path.read_bytes()
    hub.given_bytes.clear()
    child = begun(hub, tmp_path / "to")
    assert "is complete" in child.communicate(timeout=120)[0]
    assert hub.given_bytes == {}


def test_goes_on_where_it_was_killed(hub: Hub, source: Path, tmp_path: Path) -> None:
    """A node that is drained in the tenth hour of a download loses a file, and nothing is left behind."""
    whole = (source / SHARD).stat().st_size
    hub.hangs_after[SHARD] = whole - 1000
    child = begun(hub, tmp_path / "to")
    assert hub.hanging.wait(60)
    others = [path for path in source.iterdir() if path.name != SHARD]
    end = time.monotonic() + 60
    while not all((tmp_path / "to" / path.name).exists() for path in others):
        assert time.monotonic() < end
        time.sleep(0.05)
    child.kill()
    child.communicate()
    assert not (tmp_path / "to" / SHARD).exists()
    child = begun(hub, tmp_path / "to")
    _, error = child.communicate(timeout=120)
    assert child.returncode == 0, error
    assert (tmp_path / "to" / SHARD).read_bytes() == (source / SHARD).read_bytes()
    assert list((tmp_path / "to").rglob("*.incomplete")) == []
    assert not (tmp_path / "to" / ".kimi-k3-download.lock").exists()
    assert all(hub.given_bytes[path.name] == path.stat().st_size for path in others)


def test_a_hub_that_is_gone(hub: Hub, source: Path, tmp_path: Path) -> None:
    """What is there, of whatever commit, must not pass for what was asked for."""
    child = begun(hub, tmp_path / "to")
    _, error = child.communicate(timeout=120)
    assert child.returncode == 0, error
    hub.url = "http://127.0.0.1:9"
    for revision in (COMMIT, 40 * "b"):
        child = begun(hub, tmp_path / "to", "--revision", revision)
        _, error = child.communicate(timeout=120)
        assert child.returncode == ExitCode.FAILED, error


def test_two_at_a_time(hub: Hub, tmp_path: Path) -> None:
    """The second would remove what the first is writing."""
    hub.hangs_after[SHARD] = 1000
    first = begun(hub, tmp_path / "to")
    assert hub.hanging.wait(60)
    second = begun(hub, tmp_path / "to")
    _, error = second.communicate(timeout=120)
    assert second.returncode == ExitCode.IN_USE
    assert "another download is at work there" in error
    first.kill()
    first.communicate()


def test_what_came_is_looked_at(hub: Hub, source: Path, tmp_path: Path) -> None:
    """A repository whose shards are not those of its index is no checkpoint, however well it downloads."""
    (source / SHARD).unlink()
    child = begun(hub, tmp_path / "to")
    _, error = child.communicate(timeout=120)
    assert child.returncode == ExitCode.BAD_CHECKPOINT
    assert f"lacks 1 of 3 shards ({SHARD})" in error


def test_a_commit_that_is_not_there(hub: Hub, tmp_path: Path) -> None:
    """One line, with the hub's words, and that nothing is lost."""
    child = begun(hub, tmp_path / "to", "--revision", 40 * "b")
    _, error = child.communicate(timeout=120)
    assert child.returncode == ExitCode.FAILED, error
    last = error.strip().splitlines()[-1]
    assert last.startswith("kimi-k3: error: checkpoint ")
    assert "what has come is not fetched again" in last


@pytest.mark.parametrize(
    ("repository", "revision", "said"),
    [
        ("moonshotai", COMMIT, "is not OWNER/NAME"),
        ("../etc/passwd", COMMIT, "is not OWNER/NAME"),
        (REPOSITORY, "main", "is not a commit"),
        (REPOSITORY, "abc", "40 hexadecimal digits"),
    ],
)
def test_names(tmp_path: Path, repository: str, revision: str, said: str) -> None:
    """A branch can become another model over night."""
    with pytest.raises(OperatorError, match=said) as refused:
        download_checkpoint(repository, tmp_path, revision=revision, report=print)
    assert refused.value.exit_code is ExitCode.USAGE


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar's image has no hub client, and says where one is."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(OperatorError, match="in the engine's image"):
        download_checkpoint(REPOSITORY, tmp_path, revision=COMMIT, report=print)
