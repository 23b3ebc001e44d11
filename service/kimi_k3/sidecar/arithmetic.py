# SPDX-License-Identifier: Apache-2.0
"""The few sums that every view needs. What cannot be told is ``None``, never 0 or infinity."""

from __future__ import annotations

import math
from datetime import datetime

from kimi_k3.journal.models import NODE_SILENT_SECONDS, STALE_AFTER_SECONDS, NodeRecord, SupervisorRecord
from kimi_k3.journal.reader import Journal


def finite(value: float | None) -> float | None:
    """``value``, or ``None`` when it is unknown or too large for a number."""
    return value if value is not None and math.isfinite(value) else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """``part / whole``, or ``None`` when either is unknown or the whole is nothing."""
    if part is None or whole is None or whole <= 0:
        return None
    return finite(part / whole)


def total(values: list[int | None]) -> int | None:
    """The sum, or ``None`` when there is nothing to add or one of the values is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def seconds_between(earlier: datetime | None, later: datetime | None) -> float | None:
    """Seconds from one moment to another; ``None`` when one is unknown or the clock was set back."""
    if earlier is None or later is None or later < earlier:
        return None
    return (later - earlier).total_seconds()


def is_fresh(supervisor: SupervisorRecord, now: datetime) -> bool:
    """Whether the supervisor still rewrites its record.

    A record from the future counts as long as it is near: the clock may have been set back between
    two heartbeats. One from far ahead is no sign of life, or it would stay fresh until then.
    """
    return seconds_apart(supervisor.updated_at, now) <= STALE_AFTER_SECONDS


def seconds_apart(one: datetime, other: datetime) -> float:
    """Seconds between two moments, whichever is the earlier."""
    return abs((other - one).total_seconds())


def silent_nodes(journal: Journal, now: datetime) -> list[NodeRecord]:
    """The nodes that have not been heard of for a while."""
    return [node for node in journal.nodes if seconds_apart(node.heard_at, now) > NODE_SILENT_SECONDS]
