# SPDX-License-Identifier: Apache-2.0
"""Bytes that are read, against the published checkpoint's size."""

from __future__ import annotations

import pytest

from kimi_k3.plan.sharding import Parallelism
from kimi_k3.plan.storage import reading

from ..checkpoint.imitation import published_config

TOTAL = 1_560_860_324_864
PACKED = 2_722_740_830_208 // 2
CONFIG = published_config()


def test_without_a_filter_every_rank_reads_everything() -> None:
    """Eight ranks of a node ask for eight checkpoints; only the page cache makes one of them."""
    found = reading(CONFIG, Parallelism(tensor=8), ranks_per_node=8, expert_filter=False)
    assert (found.rank, found.node, found.distinct) == (TOTAL, 8 * TOTAL, TOTAL)


def test_with_the_filter_a_rank_skips_the_codes_of_other_experts() -> None:
    """Scales and everything else are still read by all."""
    found = reading(CONFIG, Parallelism(tensor=8, expert=True), ranks_per_node=8, expert_filter=True)
    assert found.rank == TOTAL - PACKED + PACKED // 8
    assert found.distinct == TOTAL


def test_the_filter_does_nothing_without_expert_parallelism() -> None:
    """A plan must not promise what a flag does not do."""
    found = reading(CONFIG, Parallelism(tensor=8), ranks_per_node=8, expert_filter=True)
    assert found.rank == TOTAL


def test_a_node_of_two_reads_half_the_experts() -> None:
    """With 16 ranks that share the experts, each node needs only those of its own eight."""
    cut = Parallelism(tensor=2, data=8, expert=True)
    found = reading(CONFIG, cut, ranks_per_node=8, expert_filter=True)
    assert found.distinct == TOTAL - PACKED + PACKED // 2


def test_seconds() -> None:
    """502 s from local NVMe (Infera) are 3.1 GB/s."""
    found = reading(CONFIG, Parallelism(tensor=8), ranks_per_node=8, expert_filter=False)
    assert found.seconds(3.11e9, cached=True) == pytest.approx(502, rel=0.01)
    assert found.seconds(3.11e9, cached=False) == pytest.approx(8 * 502, rel=0.01)
