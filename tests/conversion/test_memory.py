# SPDX-License-Identifier: Apache-2.0
"""What a conversion in place allocates: a rank's experts fill its memory, so a second copy would not fit."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kimi_k3.conversion import cpu
from kimi_k3.conversion.candidates import mse_rule
from kimi_k3.conversion.layout import STRIP_ROWS
from kimi_k3.words.weights import Int4Layout

from .groups import random_experts

pytest.importorskip("triton", reason="the kernel is written in Triton")

from .interpreter import interpreted

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Beyond scales: of a part, its counts and sums, and what is made of them on the host; and whatever is small.
BYTES_PER_PART, BYTES = 256, 4096
#: On the host, of a thread: a few words for each group of the strip that it converts.
BYTES_PER_GROUP_OF_A_STRIP = 80


class Allocations(TorchDispatchMode):
    """Bytes of every storage that torch's operations make, none of which is freed before the end."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in given}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note new storages."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._storages:
                self._storages[storage.data_ptr()] = tensor
                self.sizes.append(storage.nbytes())
        return result


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    """The GPU conversion, interpreted."""
    with interpreted() as module:
        yield module


def _tables(gpu: Any) -> tuple[torch.Tensor, ...]:
    """Made once per process, whatever is converted."""
    tables: tuple[torch.Tensor, ...] = gpu._device_tables(mse_rule(), torch.device("cpu"))
    return tables


@pytest.mark.parametrize("unusual", [False, True])
def test_on_a_gpu_only_the_scales_grow_with_the_weights(gpu: Any, unusual: bool) -> None:
    """Counted are all tensors, as if none were freed; Triton itself allocates none."""
    packed, e8m0 = map(torch.from_numpy, random_experts(1, 2, 64, 16))
    e8m0[1, 37, 3] = 255 if unusual else 127
    with Allocations(packed, e8m0, *_tables(gpu)) as allocations:
        scales, tally = gpu.convert(packed, e8m0, mse_rule(), Int4Layout.AITER, allow_nonfinite=True)
    parts = tally.lossless.size
    assert max(allocations.sizes) == scales.nbytes
    assert sum(allocations.sizes) <= scales.nbytes + BYTES_PER_PART * parts + BYTES
    assert scales.nbytes == packed.nbytes // 8


def test_rows_too_long_for_registers_take_one_experts_copy(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one of many dozens, and reused: with more experts no more is needed."""
    monkeypatch.setattr(gpu, "_KEPT_WORDS_MOST", 0)
    packed, e8m0 = map(torch.from_numpy, random_experts(2, 3, 32, 16))
    with Allocations(packed, e8m0, *_tables(gpu)) as allocations:
        scales, tally = gpu.convert(packed, e8m0, mse_rule(), Int4Layout.AITER)
    assert allocations.sizes.count(packed[0].nbytes) == 1
    rest = sum(allocations.sizes) - packed[0].nbytes
    # Each expert's scales, and all of them put together.
    assert rest <= 2 * scales.nbytes + BYTES_PER_PART * tally.lossless.size + BYTES


@pytest.mark.parametrize("layout", Int4Layout)
@pytest.mark.parametrize("experts", [2, 8])
def test_on_the_host_only_the_scales_grow_with_the_weights(layout: Int4Layout, experts: int) -> None:
    """The rest is per thread, a strip's buffers; tracemalloc sees those of the compiled code as well."""
    threads, groups = 2, 64
    packed, e8m0 = random_experts(3, experts, 512, groups)
    cpu.convert(packed[:1], e8m0[:1], mse_rule(), layout, threads=threads)  # compiles
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        scales, tally = cpu.convert(packed, e8m0, mse_rule(), layout, threads=threads)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert scales.nbytes == packed.nbytes // 8
    buffers = threads * BYTES_PER_GROUP_OF_A_STRIP * STRIP_ROWS * groups
    assert scales.nbytes <= peak <= scales.nbytes + buffers + BYTES_PER_PART * tally.lossless.size + BYTES
