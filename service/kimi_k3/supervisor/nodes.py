# SPDX-License-Identifier: Apache-2.0
"""The other nodes, as the first one knows them from its journal. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from kimi_k3.journal.models import NodeRecord
from kimi_k3.journal.reader import Journal
from kimi_k3.words.phases import Phase

LEAVING = (Phase.DRAINING, Phase.STOPPED)


class Hearing:
    """For how long each node has told nothing, by a clock that nobody sets."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[datetime, float]] = {}

    def silences(self, journal: Journal, at: float) -> dict[int, float]:
        """Seconds of silence by node; none while the journal can take no record.

        Args:
            journal: as it is now.
            at: seconds of any clock that goes on steadily.
        """
        for node in journal.nodes:
            deaf = journal.unwritable is not None
            if deaf or self._heard.get(node.node, (None,))[0] != node.heard_at:
                self._heard[node.node] = node.heard_at, at
        return {node.node: at - self._heard[node.node][1] for node in journal.nodes}


def lost_node(journal: Journal, silences: Mapping[int, float], *, patience: float) -> str | None:
    """Why the deployment cannot go on without one of its nodes; ``None`` if it can, as far as is known.

    Args:
        silences: seconds for which each node has been silent.
        patience: seconds for which one may be.
    """
    for node in journal.nodes:
        if node.superseded:
            return f"node {node.node} has begun anew, so its part of this start is gone"
        if node.supervisor.phase is Phase.FAILED and node.supervisor.ending is not None:
            return f"node {node.node} failed: {node.supervisor.ending.reason}"
        silence = silences[node.node]
        if silence > patience and node.supervisor.ending is None:
            return f"nothing was heard of node {node.node} for {silence:.0f} s"
    return None


def leaving_node(journal: Journal) -> NodeRecord | None:
    """A node that was asked to stop, if there is one."""
    return next((node for node in journal.nodes if node.supervisor.phase in LEAVING), None)
