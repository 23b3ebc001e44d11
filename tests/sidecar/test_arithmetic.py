# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from datetime import timedelta

import pytest

from kimi_k3.sidecar.arithmetic import finite, is_fresh, ratio, seconds_between, total

from .builders import NOW, at, supervisor


@pytest.mark.parametrize(
    ("part", "whole", "expected"),
    [(1, 4, 0.25), (0, 4, 0.0), (1, 0, None), (None, 4, None), (1, None, None), (1e308, 1e-308, None)],
)
def test_ratio(part: float | None, whole: float | None, expected: float | None) -> None:
    """Nothing of nothing is unknown, and so is what a number cannot hold."""
    assert expected == ratio(part, whole)


def test_infinite_is_unknown() -> None:
    """JSON has no infinity, and nobody measured one."""
    assert finite(float("inf")) is None
    assert finite(float("nan")) is None


def test_total_needs_every_part() -> None:
    """A sum that leaves out what is unknown would look like a measurement."""
    assert total([1, 2]) == 3
    assert total([1, None]) is None
    assert total([]) is None


def test_clock_set_back() -> None:
    """A duration cannot be negative; when the clock was set back it is unknown."""
    assert seconds_between(at(0), at(1)) == 60
    assert seconds_between(at(1), at(0)) is None
    assert seconds_between(None, at(0)) is None


@pytest.mark.parametrize(
    ("age", "fresh"), [(0, True), (15, True), (15.1, False), (-10, True), (-15.1, False), (86400, False)]
)
def test_freshness(age: float, fresh: bool) -> None:
    """A record from far ahead is no sign of life: it would count as fresh until the clock gets there."""
    record = supervisor(updated_at=NOW - timedelta(seconds=age))
    assert is_fresh(record, NOW) is fresh
