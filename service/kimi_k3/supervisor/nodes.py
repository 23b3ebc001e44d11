# SPDX-License-Identifier: Apache-2.0
"""The other nodes, as the first one knows them from its journal. Pure."""

from __future__ import annotations

from datetime import datetime

from kimi_k3.journal.models import NodeRecord
from kimi_k3.journal.reader import Journal
from kimi_k3.words.phases import Phase

LEAVING = (Phase.DRAINING, Phase.STOPPED)


def lost_node(journal: Journal, now: datetime, *, patience: float) -> str | None:
    """Why the deployment cannot go on without one of its nodes; ``None`` if it can, as far as is known.

    A journal that can take no record does not tell that a node is silent.

    Args:
        patience: seconds for which a node may be silent.
    """
    for node in journal.nodes:
        if node.superseded:
            return f"node {node.node} has begun anew, so its part of this start is gone"
        if node.supervisor.phase is Phase.FAILED and node.supervisor.ending is not None:
            return f"node {node.node} failed: {node.supervisor.ending.reason}"
        silence = (now - node.heard_at).total_seconds()
        if silence > patience and journal.unwritable is None and node.supervisor.ending is None:
            return f"nothing was heard of node {node.node} for {silence:.0f} s"
    return None


def leaving_node(journal: Journal) -> NodeRecord | None:
    """A node that was asked to stop, if there is one."""
    return next((node for node in journal.nodes if node.supervisor.phase in LEAVING), None)
