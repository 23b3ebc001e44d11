# SPDX-License-Identifier: Apache-2.0
"""What the sidecar's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .engine import FakeEngine, fake_engine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """An engine that answers 200 until its mood changes."""
    with fake_engine() as running:
        yield running


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own environment must not set up the sidecar."""
    for name in ("KIMI_K3_STATE_DIR", "KIMI_K3_SIDECAR_PORT", "KIMI_K3_SIDECAR_HOST"):
        monkeypatch.delenv(name, raising=False)
