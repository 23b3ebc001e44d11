# SPDX-License-Identifier: Apache-2.0
"""The published numbers, as they are read."""

from __future__ import annotations

import pytest

from kimi_k3.verify.published import published
from kimi_k3.verify.statistics import share_error


def test_gsm8k() -> None:
    """A slip of the pen would make comparisons wrong: each error is that of its share, to its last digit.

    lm_eval's error is that of a sample, with n - 1: the same here at four digits.
    """
    found = {name: one for name, one in published().items() if name.startswith("gsm8k-")}
    assert len(found) == 3
    for one in found.values():
        assert one.count == 1319
        assert one.standard_error == pytest.approx(share_error(round(one.value * 1319), 1319), abs=6e-5)


def test_requests() -> None:
    """Upstream published that every request came back, and nothing of how fast."""
    found = {name: one for name, one in published().items() if name.startswith("bench-")}
    assert [(one.value, one.count) for one in found.values()] == [(10, 10), (160, 160)]
    assert not any(one.unit for one in published().values())
