# SPDX-License-Identifier: Apache-2.0
"""What the loader says it has to read is what vLLM will read."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from kimi_k3.checkpoint import make_tiny_checkpoint
from kimi_k3.engine.loader import _Extent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("loader") / "tiny"
    make_tiny_checkpoint(directory)
    return directory


def _sizes(directory: Path) -> dict[str, dict[str, int]]:
    """Bytes of every tensor of every shard, by the safetensors library."""
    sizes = {}
    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(shard, "pt") as tensors:
            sizes[shard.name] = {name: tensors.get_tensor(name).nbytes for name in tensors.keys()}  # noqa: SIM118
    return sizes


def test_total_is_all_tensors_of_all_shards(tiny: Path) -> None:
    """A total that is too small would show 100 % long before the end."""
    sizes = _sizes(tiny)
    extent = _Extent.of(tiny, None)
    assert extent.bytes_total == sum(sum(shard.values()) for shard in sizes.values())
    counts = [len(shard) for shard in sizes.values()]
    assert extent.progress(counts[0] - 1, 1).shards_done == 0
    assert extent.progress(counts[0], 1).shards_done == 1
    assert extent.progress(sum(counts), 1).shards_done == len(counts) == 3


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
    assert _Extent.of(tiny, local).bytes_total == _Extent.of(tiny, None).bytes_total - skipped
