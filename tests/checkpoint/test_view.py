# SPDX-License-Identifier: Apache-2.0
"""What ``checkpoint show`` prints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from kimi_k3.checkpoint import inspect_checkpoint, make_tiny_checkpoint
from kimi_k3.checkpoint.index import INDEX_NAME
from kimi_k3.checkpoint.view import as_document, print_tables, rows, size


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_tiny_checkpoint(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_whole_checkpoint(directory: Path) -> None:
    """The figures an operator compares with what should be there."""
    shown = dict(rows(inspect_checkpoint(directory)))
    assert shown["decoder layers"] == "8 (6 KDA, 2 MLA; 7 with experts, 1 dense)"
    assert shown["experts per layer"] == "16"
    assert shown["shards"] == "3 ok"
    assert "problem" not in shown


def test_a_lost_shard(directory: Path) -> None:
    """It is named, the sums it spoils are unknown and not 0, and programs see it too."""
    lost = sorted(directory.glob("*.safetensors"))[0]
    lost.unlink()
    checkpoint = inspect_checkpoint(directory)
    shown = dict(rows(checkpoint))
    assert shown["shards"] == "2 ok, 1 missing"
    assert shown[f"shard {lost.name}"].startswith("missing")
    assert shown["bytes"] == "unknown"
    document = json.loads(json.dumps(as_document(checkpoint)))
    assert document["servable"] is False
    assert document["total_bytes"] is None
    assert document["problems"][0]["kind"] == "missing-shard"


def test_plain_lines_without_a_terminal(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Frames are noise in a log, and a wrapped path cannot be found with grep."""
    print_tables(inspect_checkpoint(directory))
    lines = capsys.readouterr().out.splitlines()
    assert f"checkpoint: {directory}" in lines
    assert all(line.isascii() for line in lines)


@pytest.mark.parametrize("terminal", [False, True])
def test_foreign_text(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """Names from the index and of the directory must neither steer the terminal nor forge a line."""
    index = directory / INDEX_NAME
    value = json.loads(index.read_text())
    value["weight_map"] |= {"a\x1b[2J\nproblem: none": "s\x1b[2J\nshards: 4 ok"}
    index.write_text(json.dumps(value))
    checkpoint = inspect_checkpoint(directory.rename(directory.with_name(os.fsdecode(b"k3\n\x1b]\xff"))))
    monkeypatch.setattr(Console, "is_terminal", terminal)
    print_tables(checkpoint)
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    assert "\x1b]" not in out
    assert not [line for line in out.splitlines() if line.startswith(("shards: 4", "problem: none"))]
    assert all(f"{name}{value}".isprintable() for name, value in rows(checkpoint))
    out.encode()
    json.dumps(as_document(checkpoint)).encode()


@pytest.mark.parametrize(
    ("count", "text"), [(None, "unknown"), (0, "0 (0.0 MiB)"), (1 << 30, "1,073,741,824 (1.00 GiB)")]
)
def test_sizes(count: int | None, text: str) -> None:
    """Exact for comparing, rounded for reading; unknown is a value."""
    assert size(count) == text
