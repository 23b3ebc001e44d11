# SPDX-License-Identifier: Apache-2.0
"""The conversion on the host's cores: what surrounds the kernel of :mod:`cpu_kernel`."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from kimi_k3.conversion.candidates import GROUP_SIZE, NONFINITE_FROM
from kimi_k3.conversion.cpu_kernel import (
    CLAMPED,
    ENERGY,
    LOSSLESS,
    MAX_ERROR,
    NONFINITE,
    SQUARED_ERROR,
    ZERO,
    parts_kernel,
)
from kimi_k3.conversion.layout import STRIP_ROWS, check_shape
from kimi_k3.conversion.loss import Tally
from kimi_k3.conversion.nonfinite import require_finite
from kimi_k3.words.weights import Int4Layout

if TYPE_CHECKING:
    import numpy.typing as npt

    from kimi_k3.conversion.candidates import Rule

    Octets = npt.NDArray[np.uint8]

# Enough for the loops over them, few enough for the second-level cache.
_GROUPS_PER_PART = 1 << 11
# About half a millisecond's work: little beside it is the call, and the threads end together.
_PARTS_PER_TASK = 32


def convert(
    packed: Octets,
    e8m0: Octets,
    rule: Rule,
    layout: Int4Layout,
    *,
    out: Octets | None = None,
    allow_nonfinite: bool = False,
    threads: int | None = None,
) -> tuple[npt.NDArray[np.uint16], Tally]:
    """Convert experts; bit for bit what :func:`reference.convert` makes of them.

    Args:
        packed: ``[E, N, K / 2]`` uint8, MXFP4, C-contiguous.
        e8m0: ``[E, N, K / 32]`` uint8, C-contiguous.
        rule: how scales are chosen.
        layout: of the result.
        out: where the nibbles go, like ``packed``; by default they replace it.
        allow_nonfinite: whether groups with NaN or infinite values are converted, to levels 0, and counted.
        threads: how many; by default one per core that the process may use.

    Returns:
        The scales' bf16 bits in the layout's shape, ``[E, N, G]`` or ``[E, G / 2, N, 2]`` uint16; and what
        was counted, a part being one or more strips of 16 rows.

    Raises:
        NonFiniteGroupError: a group is not finite and that is not allowed. Nothing has been written.
        ValueError: an array's shape, type or memory order is not as above, or the layout cannot hold the
            shape.
    """
    out = packed if out is None else out
    _check(packed, e8m0, out)
    experts, rows, groups = e8m0.shape
    check_shape(layout, rows, groups)
    aiter = layout is Int4Layout.AITER
    scales = np.empty((experts, groups // 2, rows, 2) if aiter else e8m0.shape, np.uint16)
    part_rows = STRIP_ROWS * max(1, _GROUPS_PER_PART // (STRIP_ROWS * max(1, groups)))
    parts = -(-rows // part_rows)
    counts = np.zeros((experts, parts, 4), np.int64)
    sums = np.zeros((experts, parts, 3), np.float64)
    arrays = (
        packed.reshape(-1),
        e8m0.reshape(-1),
        out.reshape(-1),
        scales.reshape(-1),
    )
    kernel = parts_kernel(rule)
    flat = counts.reshape(-1, counts.shape[-1]), sums.reshape(-1, sums.shape[-1])

    def task(first: int) -> None:
        last = min(first + _PARTS_PER_TASK, experts * parts)
        kernel(*arrays, *flat, rows, groups, part_rows, aiter, first, last)

    threads = threads or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads) as pool:
        if not allow_nonfinite:
            largest = pool.map(
                lambda octets: octets.max(initial=0), np.array_split(e8m0.reshape(-1), threads)
            )
            if max(largest) >= min(NONFINITE_FROM):
                require_finite(packed, e8m0)
        list(pool.map(task, range(0, experts * parts if groups else 0, _PARTS_PER_TASK)))
    return scales, Tally(
        groups_per_expert=rows * groups,
        lossless=counts[..., LOSSLESS],
        zero=counts[..., ZERO],
        nonfinite=counts[..., NONFINITE],
        clamped=counts[..., CLAMPED],
        squared_error=sums[..., SQUARED_ERROR],
        energy=sums[..., ENERGY],
        max_error=sums[..., MAX_ERROR],
    )


def _check(packed: Octets, e8m0: Octets, out: Octets) -> None:
    for name, array in (("packed", packed), ("e8m0", e8m0), ("out", out)):
        if array.dtype != np.uint8 or array.ndim != 3 or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be a C-contiguous uint8 array of three dimensions")
    expected = (*e8m0.shape[:2], e8m0.shape[2] * GROUP_SIZE // 2)
    if packed.shape != expected or out.shape != expected:
        raise ValueError(
            f"with e8m0 {e8m0.shape}, packed and out must be {expected}, got {packed.shape} and {out.shape}"
        )
    if not out.flags.writeable:
        raise ValueError(f"{'packed' if out is packed else 'out'} must be writeable")
