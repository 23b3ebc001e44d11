# SPDX-License-Identifier: Apache-2.0
"""Core lists and time budgets, for all input."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3.plan.budget import (
    TEARDOWN_SECONDS,
    budgets,
    engine_ready_timeout_seconds,
    engine_shutdown_timeout_seconds,
    exit_deadline_seconds,
)
from kimi_k3.plan.cores import core_lists


@given(cores=st.sets(st.integers(0, 511), min_size=1), ranks=st.integers(1, 16))
def test_ranks_get_equal_disjoint_lists_of_allowed_cores(cores: set[int], ranks: int) -> None:
    """Two ranks on one core would wait for each other at every barrier."""
    if len(cores) < ranks:
        with pytest.raises(ValueError, match="need at least"):
            core_lists(cores, ranks)
        return
    lists = [[int(core) for core in part.split(",")] for part in core_lists(cores, ranks).split("|")]
    assert len(lists) == ranks
    assert len({len(part) for part in lists}) == 1
    used = [core for part in lists for core in part]
    assert len(set(used)) == len(used)
    assert set(used) <= cores
    assert len(cores) - len(used) < ranks


@given(st.floats(0, 1e6))
def test_vllms_budgets_are_never_below_ours(seconds: float) -> None:
    """The message that knows the phase must come first, and a drain must not be cut short."""
    assert engine_ready_timeout_seconds(seconds) > seconds
    assert engine_shutdown_timeout_seconds(seconds) >= seconds
    # vLLM's teardown takes up to 15 s on ROCm after the last request.
    assert exit_deadline_seconds(seconds, serving=True) >= seconds + 15
    assert exit_deadline_seconds(seconds, serving=False) == TEARDOWN_SECONDS


@given(start=st.floats(1, 604_800), drain=st.floats(0, 604_800), delay=st.floats(0, 604_800))
@settings(max_examples=200, deadline=None)
def test_nobody_gives_up_before_those_who_know_more(start: float, drain: float, delay: float) -> None:
    """A probe that is shorter than the engine's own budget kills a start without a word of why (case 2)."""
    found = budgets(start, drain, delay)
    assert found.startup >= start
    assert found.progress_deadline > found.startup_probe > found.engine_ready > found.startup
    assert 300 <= found.execute_model <= 1800
    assert found.drain >= drain
    # 15 s are what vLLM itself allows its processes on ROCm.
    assert found.termination_grace >= delay + found.drain + 15
    # vLLM's own limit of a step ends a hang with a message that knows more.
    assert found.hang > found.execute_model
