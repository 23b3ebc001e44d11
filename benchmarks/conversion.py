# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM's conversion against ours, side by side in one run, on whatever device is there.

One MoE layer of Kimi-K3 as a rank of eight holds it, expert parallel (EP8) and tensor parallel (TP8). Prints
a table and, with ``--json FILE``, writes the figures. On a CPU a few experts stand for the layer, and weights
per second are what compares. Run it on an otherwise idle machine: ``python -m benchmarks.conversion``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks import upstream
from kimi_k3.conversion.candidates import GROUP_SIZE, MAGNITUDES, amax_rule, mse_rule
from kimi_k3.conversion.loss import total
from kimi_k3.words.weights import Int4Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from kimi_k3.conversion.candidates import Rule
    from kimi_k3.conversion.loss import Loss

ROUNDS = 9
"""Over all layers and ways."""
COPY_REPEATS = 9
CPU_REPEATS = 12
"""Of each of ours in a round."""
#: Bytes per group of 32: nibbles and a scale read, nibbles and a scale written.
GROUP_BYTES = 16 + 1 + 16 + 2
COPY_BYTES = 4 << 30
#: On a CPU this part of a layer's experts stands for the layer: 8 of EP8, 64 of TP8, as many weights.
CPU_PART = 14


CPU_WAYS = (
    (mse_rule(), Int4Layout.AITER),
    (mse_rule(), Int4Layout.PLAIN),
    (amax_rule(), Int4Layout.AITER),
)


@dataclass(frozen=True)
class Matrix:
    """Experts of one projection on one rank."""

    experts: int
    rows: int
    columns: int

    @property
    def groups(self) -> int:
        """Groups of 32 in all of it."""
        return self.experts * self.rows * self.columns // GROUP_SIZE


LAYERS = {
    "EP8": (Matrix(112, 6144, 3584), Matrix(112, 3584, 3072)),
    "TP8": (Matrix(896, 768, 3584), Matrix(896, 3584, 384)),
}


@dataclass
class Measured:
    """One way, one projection."""

    seconds: list[float] = field(default_factory=list)
    extra_bytes: int | None = None
    loss: Loss | None = None


@dataclass(frozen=True)
class Projection:
    """The ways of one projection, and what measures each of them once more."""

    ways: dict[str, Measured]
    measure: Callable[[], None]


@dataclass(frozen=True)
class Figure:
    """One way, one layer."""

    layer: str
    way: str
    seconds: float
    slowest_seconds: float
    gigabytes_per_second: float
    of_copy: float | None
    extra_bytes: int | None
    relative_mse: float | None
    weights_per_second: float


def quantised(matrix: Matrix, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussian weights as MXFP4 with the OCP exponent: nibbles and E8M0 bytes."""
    generator = torch.Generator(device).manual_seed(seed)
    groups = matrix.columns // GROUP_SIZE
    packed = torch.empty((matrix.experts, matrix.rows, matrix.columns // 2), dtype=torch.uint8, device=device)
    e8m0 = torch.empty((matrix.experts, matrix.rows, groups), dtype=torch.uint8, device=device)
    middles = torch.tensor(MAGNITUDES, device=device)
    middles = (middles[1:] + middles[:-1]) / 2
    for expert in range(matrix.experts):
        weights = torch.randn((matrix.rows, groups, GROUP_SIZE), device=device, generator=generator) / 64
        exponent = torch.floor(torch.log2(weights.abs().amax(-1))) - 2
        scaled = weights / torch.exp2(exponent)[..., None]
        codes = torch.bucketize(scaled.abs(), middles) | (8 * (scaled < 0))
        codes = codes.view(matrix.rows, -1, 2).to(torch.uint8)
        packed[expert] = codes[..., 0] | (codes[..., 1] << 4)
        e8m0[expert] = (exponent + 127).to(torch.uint8)
    return packed, e8m0


class Gpu:
    """Measures on the current CUDA or ROCm device, with device events."""

    def __init__(self) -> None:
        from kimi_k3.conversion import gpu

        self.gpu = gpu
        self.device = torch.device("cuda")
        self.name = torch.cuda.get_device_name()
        self.layers = LAYERS
        source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        self.copy_speed = (
            2 * COPY_BYTES / statistics.median(self._time(lambda: target.copy_(source), COPY_REPEATS))
        )

    def _time(
        self, work: Callable[[], object], repeats: int, before: Callable[[], object] | None = None
    ) -> list[float]:
        """Seconds per call; ``before`` is not measured, and hides what the host needs to start ``work``."""
        seconds = []
        for _ in range(repeats + 1):
            if before is not None:
                before()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            done = work()
            end.record()
            torch.cuda.synchronize()
            del done
            seconds.append(begin.elapsed_time(end) / 1e3)
        return seconds[1:]

    def _extra(self, work: Callable[[], object]) -> int:
        """Bytes beyond what is allocated that ``work`` needs at its peak, its result included."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        done = work()
        torch.cuda.synchronize()
        del done
        return torch.cuda.max_memory_allocated() - before

    def begin(self, matrix: Matrix, seed: int) -> Projection:
        """Losses and extra bytes of each way of one projection, and how a round of it is measured."""
        source, e8m0 = quantised(matrix, self.device, seed)
        packed, apart, rule = source.clone(), torch.empty_like(source), mse_rule()
        copies: list[torch.Tensor] = []

        def restore() -> None:
            packed.copy_(source)

        def ours(target: torch.Tensor) -> object:
            return self.gpu.launch(packed, e8m0, target, rule, Int4Layout.AITER)

        def loss(rule: Rule) -> Loss:
            restore()
            return total(self.gpu.convert(packed, e8m0, rule, Int4Layout.AITER)[1].losses())

        def copy() -> None:
            # As vLLM's loader leaves it between two layers: the source allocated, nothing cached.
            copies[:] = source.clone(), e8m0.clone()
            torch.cuda.empty_cache()

        def steps() -> object:
            return upstream.convert(copies)

        copy()
        nibbles, scales = upstream.convert(copies)
        restore()
        bits = self.gpu.convert(packed, e8m0, amax_rule(), Int4Layout.AITER)[0]
        assert torch.equal(packed, nibbles)
        assert torch.equal(bits.view(torch.int16).flatten(), scales.view(torch.int16))
        del nibbles, scales, bits
        copy()
        ways = {"upstream's steps": Measured(extra_bytes=self._extra(steps), loss=loss(amax_rule()))}
        works: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "upstream's steps": (steps, copy)
        }
        for name, target in (("ours, out of place", apart), ("ours, in place", packed)):
            work = partial(ours, target)
            works[name] = work, restore
            ways[name] = Measured(extra_bytes=self._extra(work), loss=loss(rule))

        def measure() -> None:
            for name, (work, before) in works.items():
                ways[name].seconds += self._time(work, 1, before)

        return Projection(ways, measure)


class Cpu:
    """Measures on this machine's cores, with a wall clock."""

    copy_speed = None

    def __init__(self) -> None:
        from kimi_k3.conversion import cpu

        self.cpu = cpu
        self.cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(self.cores)
        self.device = torch.device("cpu")
        self.name = f"{self.cores} cores, {platform.processor() or platform.machine()}"
        self.layers = {
            name: tuple(
                Matrix(matrix.experts // CPU_PART, matrix.rows, matrix.columns) for matrix in matrices
            )
            for name, matrices in LAYERS.items()
        }

    def begin(self, matrix: Matrix, seed: int) -> Projection:
        """As :meth:`Gpu.begin`, but nothing counts the memory."""
        source, e8m0 = (tensor.numpy() for tensor in quantised(matrix, self.device, seed))
        packed = np.empty_like(source)
        steps, ours = Measured(), {}
        for rule, layout in CPU_WAYS:
            # What is not compiled yet is now.
            loss = total(self.cpu.convert(source.copy(), e8m0, rule, layout)[1].losses())
            ours[rule, layout] = Measured(loss=loss)

        def measure() -> None:
            begin = time.perf_counter()
            upstream.convert([torch.from_numpy(source), torch.from_numpy(e8m0)])
            steps.seconds.append(time.perf_counter() - begin)
            for (rule, layout), way in ours.items():
                seconds = []
                for _ in range(CPU_REPEATS + 1):
                    # By one thread: those that torch copies with go on spinning and take a core from ours.
                    np.copyto(packed, source)
                    begin = time.perf_counter()
                    self.cpu.convert(packed, e8m0, rule, layout)[1].losses()
                    seconds.append(time.perf_counter() - begin)
                way.seconds += seconds[1:]

        names = {f"ours, in place, {rule.name}, {layout}": way for (rule, layout), way in ours.items()}
        return Projection({"upstream's steps": steps} | names, measure)


def measured(machine: Gpu | Cpu) -> dict[str, list[dict[str, Measured]]]:
    """Per layer and projection: each way.

    In rounds of everything, as a core that is shared with others is faster and slower by turns, and
    upstream's steps depend on the host's core on a GPU, too.
    """
    layers = {
        layer: [machine.begin(matrix, seed) for seed, matrix in enumerate(matrices)]
        for layer, matrices in machine.layers.items()
    }
    for _ in range(ROUNDS):
        for projections in layers.values():
            for projection in projections:
                projection.measure()
    return {layer: [one.ways for one in projections] for layer, projections in layers.items()}


def figures(machine: Gpu | Cpu) -> list[Figure]:
    """All ways on all layers."""
    rows = []
    for layer, projections in measured(machine).items():
        groups = sum(matrix.groups for matrix in machine.layers[layer])
        for way in projections[0]:
            parts = [one[way] for one in projections]
            seconds = sum(statistics.median(part.seconds) for part in parts)
            speed = groups * GROUP_BYTES / seconds
            losses = [part.loss for part in parts if part.loss is not None]
            extras = [part.extra_bytes for part in parts if part.extra_bytes is not None]
            rows.append(
                Figure(
                    layer=layer,
                    way=way,
                    seconds=seconds,
                    slowest_seconds=sum(max(part.seconds) for part in parts),
                    gigabytes_per_second=speed / 1e9,
                    of_copy=speed / machine.copy_speed if machine.copy_speed else None,
                    extra_bytes=max(extras) if extras else None,
                    relative_mse=total(losses).relative_mse if losses else None,
                    weights_per_second=groups * GROUP_SIZE / seconds,
                )
            )
    return rows


def table(rows: list[Figure]) -> str:
    """The figures in Markdown."""
    lines = [
        "| layer | way | ms (slowest) | times faster | GB/s | of copy | G weights/s | extra MiB "
        "| relative MSE |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = next(other for other in rows if other.layer == row.layer)
        lines.append(
            f"| {row.layer} | {row.way} | {row.seconds * 1e3:.2f} ({row.slowest_seconds * 1e3:.2f}) "
            f"| {base.seconds / row.seconds:.0f} | {row.gigabytes_per_second:.0f} "
            f"| {'' if row.of_copy is None else f'{row.of_copy:.1%}'} | {row.weights_per_second / 1e9:.2f} "
            f"| {'' if row.extra_bytes is None else f'{row.extra_bytes / 2**20:.1f}'} "
            f"| {'' if row.relative_mse is None else f'{row.relative_mse:.5f}'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    options = parser.parse_args()
    machine = Gpu() if options.device == "cuda" else Cpu()
    rows = figures(machine)
    speed = "" if machine.copy_speed is None else f", copies at {machine.copy_speed / 1e9:.0f} GB/s"
    print(f"{machine.name}{speed}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}\n\n{table(rows)}")
    if options.json:
        options.json.write_text(
            json.dumps(
                {"machine": machine.name, "copy_speed": machine.copy_speed, "rows": [asdict(r) for r in rows]}
            )
        )


if __name__ == "__main__":
    main()
