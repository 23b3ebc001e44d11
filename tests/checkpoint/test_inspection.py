# SPDX-License-Identifier: Apache-2.0
"""Inspecting checkpoints: a good one, the published one's size, and every way to be broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kimi_k3.checkpoint import ProblemKind, ShardState, inspect_checkpoint, require_servable
from kimi_k3.checkpoint.index import INDEX_NAME
from kimi_k3.checkpoint.tiny import shard_name
from kimi_k3.errors import ExitCode, OperatorError

from .imitation import (
    FOREIGN_NAMES,
    PUBLISHED_CONFIG,
    PUBLISHED_SHARDS,
    SPECIAL_FILES,
    edit_json,
    write_imitation,
    write_small,
)

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST, SECOND = shard_name(1, 3), shard_name(2, 3)
#: MiB; half of it is Python with pydantic and the text of the index.
PEAK_RSS = 300


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A good small checkpoint, to be broken."""
    directory = tmp_path / "k3"
    directory.mkdir()
    return write_small(directory)


def test_good(small: Path) -> None:
    """The figures the planner starts from."""
    found = require_servable(small)
    assert (found.layers, found.experts, found.tensor_count) == (8, 16, 896)
    assert (found.kda_layers, found.mla_layers) == ((0, 1, 2, 4, 5, 6), (3, 7))
    assert (found.dense_layers, found.moe_layers) == ((0,), tuple(range(1, 8)))
    assert found.routed_expert_bytes == 7 * 16 * found.expert.nbytes
    assert found.bytes_by_dtype is not None
    assert found.total_bytes == found.index_total_size == sum(found.bytes_by_dtype.values())
    assert [shard.state for shard in found.shards] == [ShardState.OK] * 3
    assert found.problems == ()


def test_single_file(tmp_path: Path) -> None:
    """A checkpoint of one file has no index and needs none."""
    write_imitation(tmp_path, (write_config(tmp_path)).read_text(), 1)
    (tmp_path / shard_name(1, 1)).rename(tmp_path / "model.safetensors")
    (tmp_path / INDEX_NAME).unlink()
    found = require_servable(tmp_path)
    assert found.tensor_count == 896
    assert found.index_total_size is None


def write_config(directory: Path) -> Path:
    """The tiny config.json alone."""
    without_weights(write_small(directory))
    return directory / "config.json"


def cut(path: Path, size: int) -> None:
    """Shorten a file."""
    os.truncate(path, size)


def rename_tensor(directory: Path, old: str, new: str) -> None:
    """Rename a tensor, of equally long name, in index and shard."""
    assert len(old) == len(new)
    for path in (directory / INDEX_NAME, directory / FIRST):
        path.write_bytes(path.read_bytes().replace(f'"{old}"'.encode(), f'"{new}"'.encode()))


def forget_tensor(directory: Path) -> None:
    """Let the index name a tensor that its shard does not hold."""
    value = json.loads((directory / INDEX_NAME).read_text())
    value["weight_map"]["language_model.extra"] = SECOND
    (directory / INDEX_NAME).write_text(json.dumps(value))


def to_file(directory: Path) -> None:
    """A file where the directory was."""
    moved = directory.with_name("moved")
    directory.rename(moved)
    (moved / "config.json").rename(directory)


def emptied(directory: Path) -> None:
    """No files left."""
    for path in directory.iterdir():
        path.unlink()


def dangle(directory: Path) -> None:
    """A link into the hub's cache whose file is gone."""
    (directory / SECOND).unlink()
    (directory / SECOND).symlink_to("../blobs/1")


def without_weights(directory: Path) -> None:
    """Only the small JSON files were downloaded."""
    for path in directory.glob("model*"):
        path.unlink()


def download(directory: Path, name: str) -> None:
    """A leftover of a download."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"
A_LOG = "language_model.model.layers.0.self_attn.A_log"

BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (lambda d: d.rename(d.with_name("x")), "does not exist; check the path"),
    "a file": (to_file, "is a file; name the directory"),
    "empty": (emptied, "is an empty directory; download"),
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json; name the directory"),
    "config not json": (lambda d: cut(d / "config.json", 100), "config.json is not valid JSON"),
    "architecture": (
        lambda d: edit_json(d / "config.json", architectures=["DeepseekV3ForCausalLM"]),
        "architecture DeepseekV3ForCausalLM, expected KimiK3ForConditionalGeneration; point at",
    ),
    "missing shard": (lambda d: (d / SECOND).unlink(), f"lacks 1 of 3 shards ({SECOND}); download"),
    "dangling link": (
        dangle,
        f"lacks 1 of 3 shards ({SECOND}); download",
    ),
    "truncated shard": (lambda d: cut(d / SECOND, 1_000_000), f"{SECOND} is truncated (1,000,000 of at"),
    "truncated header": (lambda d: cut(d / SECOND, 100), f"{SECOND} is truncated (100 of at least"),
    "empty shard": (lambda d: cut(d / SECOND, 0), f"{SECOND} is truncated (0 of at least 8 bytes)"),
    "longer shard": (lambda d: cut(d / SECOND, 9_000_000), "bytes longer than its header says; download"),
    "damaged shard": (lambda d: (d / SECOND).write_bytes(bytes(100)), f"{SECOND} is not a valid safetens"),
    "incomplete": (lambda d: download(d, "a.incomplete"), "unfinished downloads (a.incomplete); let the"),
    "incomplete in cache": (
        lambda d: download(d, ".cache/huggingface/download/x.y.incomplete"),
        "unfinished downloads (.cache/huggingface/download/x.y.incomplete); let the download",
    ),
    "no index": (lambda d: (d / INDEX_NAME).unlink(), f"3 *.safetensors files but no {INDEX_NAME}"),
    "damaged index": (lambda d: cut(d / INDEX_NAME, 5000), f"{INDEX_NAME} is damaged"),
    "no weights": (
        without_weights,
        "has no *.safetensors file; download",
    ),
    "index of other shards": (forget_tensor, f"names 1 tensors that their shards do not hold (in {SECOND}"),
    "expert of another name": (
        lambda d: rename_tensor(d, EXPERT, EXPERT.replace("weight_packed", "weight_wacked")),
        f"lacks 1 tensors its config.json calls for ({EXPERT})",
    ),
    "other tensor of another name": (
        lambda d: rename_tensor(d, A_LOG, A_LOG.replace("A_log", "B_log")),
        f"lacks 1 tensors its config.json calls for ({A_LOG})",
    ),
    "expert of another shape": (
        lambda d: edit_json(d / "config.json", text_config=wider_experts(d)),
        f"672 tensors of another shape ({EXPERT} is U8 [128, 64], expected U8 [256, 64]); config.json",
    ),
}


def wider_experts(directory: Path) -> dict[str, object]:
    """The text_config of a model whose experts are twice as wide and shared experts as they are."""
    text: dict[str, object] = json.loads((directory / "config.json").read_text())["text_config"]
    return {**text, "moe_intermediate_size": 256, "num_shared_experts": 0}


@pytest.mark.parametrize("case", BROKEN)
def test_broken(small: Path, case: str) -> None:
    """Each way a checkpoint can be broken gives its own line with what, where, and what to do."""
    spoil, words = BROKEN[case]
    spoil(small)
    with pytest.raises(OperatorError) as caught:
        require_servable(small)
    line = str(caught.value)
    assert words in line
    assert str(small) in line
    assert "\n" not in line
    assert caught.value.exit_code is ExitCode.BAD_CHECKPOINT


@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_shard_is_no_regular_file(small: Path, kind: str) -> None:
    """It is damage, named as such: not a wait for a FIFO's writer and not a shard to download beside it."""
    (small / SECOND).unlink()
    SPECIAL_FILES[kind](small / SECOND)
    found = inspect_checkpoint(small)
    assert [problem.kind for problem in found.problems] == [ProblemKind.DAMAGED_SHARD]
    assert f"{SECOND} is not a valid safetensors file (it is a {kind}, not a" in found.problems[0].what
    assert (found.shards[1].state, found.shards[1].size) == (ShardState.DAMAGED, None)


@pytest.mark.parametrize("text", FOREIGN_NAMES)
def test_foreign_text(small: Path, text: str) -> None:
    """Names that index, headers and directory give must be printable wherever a message repeats them."""
    value = json.loads((small / INDEX_NAME).read_text())
    value["weight_map"][text] = SECOND
    if text.isascii():
        value["weight_map"]["other"] = text
    (small / INDEX_NAME).write_text(json.dumps(value))
    (small / os.fsdecode(f"{text}.incomplete".encode(errors="ignore"))).touch()
    moved = small.rename(small.with_name(os.fsdecode(b"k3\n\x1b\xff")))
    problems = inspect_checkpoint(moved).problems
    assert {ProblemKind.INCOMPLETE_FILE, ProblemKind.TENSOR_NOT_IN_SHARD} <= {p.kind for p in problems}
    assert all(str(problem).isprintable() for problem in problems)


def test_config_calls_for_millions(small: Path) -> None:
    """Of the tensors a wrong config calls for only the first few are named, the others only counted."""
    text = json.loads((small / "config.json").read_text())["text_config"]
    edit_json(small / "config.json", text_config={**text, "num_experts": 100_000})
    what = next(p.what for p in inspect_checkpoint(small).problems if p.kind is ProblemKind.MISSING_TENSOR)
    assert f"lacks {7 * (100_000 - 16) * 6:,} tensors" in what
    assert len(what) < 500


def test_several_problems(small: Path) -> None:
    """One error, but the operator must know that mending one thing will not be all."""
    (small / FIRST).unlink()
    cut(small / SECOND, 10)
    with pytest.raises(OperatorError, match=r"\(and 1 more problem\)"):
        require_servable(small)
    found = inspect_checkpoint(small)
    assert [problem.kind for problem in found.problems] == [
        ProblemKind.MISSING_SHARD,
        ProblemKind.TRUNCATED_SHARD,
    ]


def test_unknown_is_none(small: Path) -> None:
    """With a shard unread the totals are not known; a smaller number would be a lie."""
    (small / FIRST).unlink()
    found = inspect_checkpoint(small)
    assert (found.total_bytes, found.bytes_by_dtype, found.routed_expert_bytes) == (None, None, None)
    assert found.tensor_count == 896
    assert found.shards[0].size is None


def test_total_size_is_a_note(small: Path) -> None:
    """vLLM does not read total_size, so a wrong one is reported and does not stop a service."""
    edit_json(small / INDEX_NAME, metadata={"total_size": 1})
    found = require_servable(small)
    assert [(problem.kind, problem.fatal) for problem in found.problems] == [(ProblemKind.TOTAL_SIZE, False)]
    assert "says total_size 1, its shards hold 14,914,112 bytes" in str(found.problems[0])


def test_unreadable_directory(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that answers with errors is reported in a line, too."""

    def fail(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(OperatorError, match=r"cannot be read \(Permission denied\)"):
        inspect_checkpoint(small)


MEASURE = """
import sys
from pathlib import Path
from kimi_k3.checkpoint import require_servable
found = require_servable(Path(sys.argv[1]))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(found.tensor_count, found.total_bytes, len(found.shards), peak.split()[1])
"""


def test_published_size(tmp_path: Path) -> None:
    """Half a million names must not cost the memory of a small sidecar.

    VmHWM belongs to one program; ru_maxrss would inherit the test runner's peak.
    """
    write_imitation(tmp_path, PUBLISHED_CONFIG.read_text(), PUBLISHED_SHARDS)
    # The published index has exactly this size, so the names are the published ones to the last letter.
    assert (tmp_path / INDEX_NAME).stat().st_size == 59_764_096
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    tensors, size, shards, peak = map(int, output.split())
    assert (tensors, size, shards) == (497_220, 1_560_860_324_864, 96)
    assert peak / 1024 < PEAK_RSS
