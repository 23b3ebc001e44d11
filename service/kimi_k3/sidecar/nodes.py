# SPDX-License-Identifier: Apache-2.0
"""What the other nodes of a deployment tell the first one, into whose journal it goes.

So every view of the first node's sidecar is about all ranks, and its supervisor knows what it has to know
before it lets the deployment serve. Only with a token: whoever may write here decides whether the deployment
is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from fastapi import HTTPException

from kimi_k3.journal.models import (
    NODE_SILENT_SECONDS,
    NodeRecord,
    NodeReport,
    RankRecord,
    SupervisorRecord,
    node_file,
    rank_file,
)
from kimi_k3.journal.reader import Journal
from kimi_k3.journal.writer import write_record
from kimi_k3.sidecar.arithmetic import seconds_apart
from kimi_k3.words.sidecar import TOKEN


def heard(
    directory: Path,
    journal: Journal,
    node: int,
    report: NodeReport,
    now: datetime,
    *,
    remember: Callable[[NodeRecord], None],
) -> SupervisorRecord:
    """Keep what a node tells of itself; returns the record of this, the first one.

    Args:
        remember: keeps it, too, for as long as this process lives: a full directory shall not make a node
            seem to be there, or gone.

    Raises:
        HTTPException: there is no start that the node could be part of, or it has begun anew since it joined.
        OSError: the state directory cannot be written.
    """
    own = _start(journal, node, report.start_id, now)
    if report.supervisor.node != node:
        raise HTTPException(422, f"this is the record of node {report.supervisor.node}")
    known = next((each for each in journal.nodes if each.node == node), None)
    if known is not None and known.supervisor.start_id != report.supervisor.start_id:
        if not known.superseded and (now - known.heard_at).total_seconds() <= NODE_SILENT_SECONDS:
            # A machine that was started with another one's rank must not end what that one serves.
            raise HTTPException(409, f"node {node} is there already, as start {known.supervisor.start_id}")
        if not known.superseded:
            if report.start_id is None:
                # It may be of another deployment: it finds that out by this record, before it joins.
                return own
            write_record(directory, node_file(node), known.model_copy(update={"superseded": True}))
        raise HTTPException(409, f"node {node} was part of this start before, and has begun anew since")
    if known is not None and known.superseded:
        raise HTTPException(410, f"node {node} has begun anew since")
    if report.start_id is not None:
        record = NodeRecord(
            start_id=own.start_id,
            node=node,
            heard_at=now,
            supervisor=report.supervisor,
            summaries=report.summaries,
        )
        remember(record)
        write_record(directory, node_file(node), record)
    return own


def heard_of_rank(
    directory: Path, journal: Journal, node: int, rank: int, record: RankRecord, now: datetime
) -> None:
    """Keep what a node tells of one of its ranks.

    Raises:
        HTTPException: the rank is none of that node's, or belongs to another start.
        OSError: the state directory cannot be written.
    """
    own = _start(journal, node, record.start_id, now)
    if record.rank != rank or rank not in own.model_copy(update={"node": node}).ranks_here:
        raise HTTPException(422, f"rank {record.rank} is none of node {node}")
    write_record(directory, rank_file(rank), record)


def with_remembered(journal: Journal, remembered: Mapping[int, NodeRecord]) -> Journal:
    """The journal, with what was heard since its files were written; the same object if that is nothing."""
    own = journal.supervisor
    written = {record.node: record for record in journal.nodes}
    newer = {
        node: record
        for node, record in remembered.items()
        if own is not None
        and record.start_id == own.start_id
        and (node not in written or written[node].heard_at < record.heard_at)
        and not (node in written and written[node].superseded)
    }
    if not newer:
        return journal
    nodes = {**written, **newer}
    return replace(journal, nodes=tuple(nodes[node] for node in sorted(nodes)))


def require_token(token: str | None) -> None:
    """Nobody tells anything to a sidecar that asks nobody who they are.

    Raises:
        HTTPException: there is no token.
    """
    if token is None:
        raise HTTPException(403, f"nodes are heard only with a token; set {TOKEN}")


def _start(journal: Journal, node: int, start_id: str | None, now: datetime) -> SupervisorRecord:
    own = journal.supervisor
    # A node that has joined learns how the start ended.
    ended = own is not None and (
        own.ending is not None or seconds_apart(own.updated_at, now) > NODE_SILENT_SECONDS
    )
    if own is not None and start_id is not None and start_id != own.start_id:
        raise HTTPException(410, "the first node has begun another start")
    if own is None or (ended and start_id != own.start_id):
        raise HTTPException(409, "the first node has no start that lives")
    if own.headless or not 0 < node < own.nodes:
        raise HTTPException(
            422,
            f"node {own.node} of a deployment over {own.nodes} nodes has nothing to hear from node {node}",
        )
    return own
