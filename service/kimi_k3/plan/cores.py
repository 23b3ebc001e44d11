# SPDX-License-Identifier: Apache-2.0
"""Which CPU cores each rank computes on."""

from __future__ import annotations

from collections.abc import Collection


def core_lists(cores: Collection[int], ranks: int) -> str:
    """``VLLM_CPU_OMP_THREADS_BIND``: one list of cores per rank, e.g. ``0,1|2,3``.

    Ranks get disjoint runs of equal length; cores that do not divide evenly stay free. vLLM's own
    ``auto`` gives every rank a NUMA node and refuses more ranks than nodes.

    Raises:
        ValueError: fewer cores than ranks.
    """
    each = len(cores) // ranks
    if each == 0:
        raise ValueError(f"{ranks} ranks need at least {ranks} cores, there are {len(cores)}")
    ordered = sorted(cores)
    return "|".join(
        ",".join(str(core) for core in ordered[rank * each : (rank + 1) * each]) for rank in range(ranks)
    )
