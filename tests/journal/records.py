# SPDX-License-Identifier: Apache-2.0
"""Small whole records."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from kimi_k3.journal.models import CheckpointSummary, FailureRecord, RankRecord, SupervisorRecord
from kimi_k3.words.weights import Weights

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


def supervisor(**changes: Any) -> SupervisorRecord:
    """A supervisor that has just started."""
    given: dict[str, Any] = {
        "start_id": "this",
        "pid": 1,
        "started_at": NOW,
        "updated_at": NOW,
        "profile": "tp8",
        "checkpoint": CheckpointSummary(
            name="k3", total_bytes=9, shards=1, decoder_layers=2, moe_layers=(1,), experts=4
        ),
        "served_model_name": "kimi-k3",
        "weights": Weights.MXFP4,
        "requantisation": None,
        "consent": None,
        "world_size": 1,
        "engine_url": "http://127.0.0.1:8000",
    }
    return SupervisorRecord(**(given | changes))


def rank(number: int, **changes: Any) -> RankRecord:
    """A rank that has just started."""
    given: dict[str, Any] = {
        "start_id": "this",
        "rank": number,
        "pid": 2,
        "updated_at": NOW,
        "weights": Weights.MXFP4,
        "requantisation": None,
    }
    return RankRecord(**(given | changes))


def failure(pid: int, **changes: Any) -> FailureRecord:
    """A failure that a process reported."""
    given: dict[str, Any] = {"start_id": "this", "pid": pid, "at": NOW, "what": "no", "remedy": "yes"}
    return FailureRecord(**(given | changes))
