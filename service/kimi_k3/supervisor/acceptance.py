# SPDX-License-Identifier: Apache-2.0
"""Whether every rank did what was asked, before a start may serve. Pure.

vLLM swallows an exception of a plugin ("Failed to load plugin") and serves without it, and it
silently ignores an int4 request that it cannot honour. So silence is a failure: each rank has to
say itself what it serves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kimi_k3.journal.models import RankSummary, SupervisorRecord
from kimi_k3.words.weights import Projection


def objection(record: SupervisorRecord, ranks: Sequence[RankSummary]) -> str | None:
    """Why this start may not serve, or ``None``.

    Args:
        record: what was asked.
        ranks: what the ranks of this start reported.
    """
    reported = Counter(rank.rank for rank in ranks if rank.start_id == record.start_id)
    expected = range(record.world_size) if record.ranks_report else range(0)
    missing = [rank for rank in expected if not reported[rank]]
    if missing:
        return (
            f"no report of rank {_listed(missing)}: the engine plugin did not run there, "
            "so nobody knows what is served"
        )
    foreign = sorted(set(reported) - set(expected))
    if foreign:
        return f"rank {_listed(foreign)} reported, but only {len(expected)} ranks should"
    refused = [rank.rank for rank in ranks if rank.signs_refused and rank.start_id == record.start_id]
    if refused and len(refused) < record.world_size:
        return (
            f"the kernel of rank {_listed(refused)} computes negative scales wrongly and the others' do not: "
            "their GPUs or builds differ"
        )
    for rank in ranks:
        if problem := _problem(record, rank):
            return f"rank {rank.rank} {problem}"
    return None


def _problem(record: SupervisorRecord, rank: RankSummary) -> str | None:
    if rank.weights is not record.weights:
        return f"serves {rank.weights} weights, {record.weights} was asked"
    wanted_way = record.requantisation
    if rank.signs_refused and wanted_way is not None:
        wanted_way = wanted_way.model_copy(update={"negative_scale": False})
    if rank.requantisation != wanted_way:
        return f"converted with {rank.requantisation or 'no scale rule'}, {wanted_way} was asked"
    wanted = (
        {(layer, projection) for layer in record.moe_layers_of(rank.rank) for projection in Projection}
        if record.weights.lossy
        else set()
    )
    done = Counter(rank.converted)
    for what, odd in (
        ("did not convert", sorted(wanted - set(done))),
        ("converted unasked", sorted(set(done) - wanted)),
        ("converted more than once", sorted(key for key, count in done.items() if count > 1)),
    ):
        if odd:
            layer, projection = odd[0]
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            return f"{what} {projection} of layer {layer}{more}"
    return None


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
