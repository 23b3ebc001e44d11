# SPDX-License-Identifier: Apache-2.0
"""What the loader says it has to read is what vLLM will read."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import safe_open
from vllm.config.load import LoadConfig

from kimi_k3.checkpoint import make_tiny_checkpoint
from kimi_k3.engine.loader import ReportingModelLoader, _Extent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("loader") / "tiny"
    make_tiny_checkpoint(directory)
    return directory


def _shards(directory: Path) -> list[Path]:
    return list(directory.glob("*.safetensors"))


def _sizes(directory: Path) -> dict[str, dict[str, int]]:
    """Bytes of every tensor of every shard, by the safetensors library."""
    sizes = {}
    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(shard, "pt") as tensors:
            sizes[shard.name] = {name: tensors.get_tensor(name).nbytes for name in tensors.keys()}  # noqa: SIM118
    return sizes


BEGAN = datetime(2026, 12, 1, tzinfo=UTC)


def test_total_is_all_tensors_of_all_shards(tiny: Path) -> None:
    """A total that is too small would show 100 % long before the end."""
    sizes = _sizes(tiny)
    extent = _Extent.of(_shards(tiny), None)
    assert extent.bytes_total == sum(sum(shard.values()) for shard in sizes.values())
    counts = [len(shard) for shard in sizes.values()]
    assert extent.progress(counts[0] - 1, 1, BEGAN).shards_done == 0
    assert extent.progress(counts[0], 1, BEGAN).shards_done == 1
    assert extent.progress(sum(counts), 1, BEGAN).shards_done == len(counts) == 3


def _loader() -> ReportingModelLoader:
    return ReportingModelLoader(LoadConfig(load_format="kimi_k3"))


def test_a_stray_file_beside_the_shards_is_not_counted(tiny: Path, tmp_path: Path) -> None:
    """vLLM reads what the index names; a file that a copying tool left there must not end the load."""
    checkpoint = tmp_path / "copied"
    shutil.copytree(tiny, checkpoint)
    (checkpoint / "._model-00001-of-000003.safetensors").write_bytes(b"\xff" * 4096)
    extent = _loader()._extent(SimpleNamespace(model=str(checkpoint), revision=None))
    assert extent == _Extent.of(_shards(tiny), None)


def test_progress_that_cannot_be_told_is_no_reason_not_to_load(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading the weights is vLLM's business, and it has its own words for what is wrong with them."""
    checkpoint = tmp_path / "damaged"
    shutil.copytree(tiny, checkpoint)
    next(checkpoint.glob("*.safetensors")).write_bytes(b"\xff" * 64)
    assert _loader()._extent(SimpleNamespace(model=str(checkpoint), revision=None)) is None
    assert capsys.readouterr().err.startswith("kimi-k3: progress of loading is not visible: ")


def test_expert_parallel_filter_leaves_out_what_other_ranks_read(tiny: Path) -> None:
    """With --enable-ep-weight-filter vLLM skips other ranks' packed weights before reading them."""
    local = {0, 1, 2, 3}
    skipped = sum(
        size
        for shard in _sizes(tiny).values()
        for name, size in shard.items()
        if ".experts." in name
        and name.endswith(".weight_packed")
        and int(name.split(".experts.")[1].split(".")[0]) not in local
    )
    assert skipped > 0
    assert (
        _Extent.of(_shards(tiny), local).bytes_total == _Extent.of(_shards(tiny), None).bytes_total - skipped
    )
