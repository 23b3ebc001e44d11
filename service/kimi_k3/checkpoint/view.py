# SPDX-License-Identifier: Apache-2.0
"""A checkpoint for people (a table, or plain lines when nobody looks at a terminal) and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kimi_k3.checkpoint import Checkpoint, ShardState
from kimi_k3.words.text import printable

UNKNOWN = "unknown"
GIB = 1024**3
MIB = 1024**2


def as_document(checkpoint: Checkpoint) -> dict[str, Any]:
    """JSON-ready; a number that is not known is ``None``, layer numbers count from 0, sizes are bytes."""
    return {
        "path": str(checkpoint.path),
        "servable": not checkpoint.fatal,
        "layers": checkpoint.layers,
        "kda_layers": list(checkpoint.kda_layers),
        "mla_layers": list(checkpoint.mla_layers),
        "moe_layers": list(checkpoint.moe_layers),
        "dense_layers": list(checkpoint.dense_layers),
        "experts": checkpoint.experts,
        "tensor_count": checkpoint.tensor_count,
        "total_bytes": checkpoint.total_bytes,
        "routed_expert_bytes": checkpoint.routed_expert_bytes,
        "bytes_by_dtype": None if checkpoint.bytes_by_dtype is None else dict(checkpoint.bytes_by_dtype),
        "shards": [
            {"name": shard.name, "size": shard.size, "expected": shard.expected, "state": shard.state.value}
            for shard in checkpoint.shards
        ],
        "problems": [
            {
                "kind": problem.kind.value,
                "fatal": problem.fatal,
                "what": problem.what,
                "remedy": problem.remedy,
            }
            for problem in checkpoint.problems
        ],
    }


def rows(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """What is shown, as pairs of a name and a value; foreign text in it is printable."""
    yield "checkpoint", printable(str(checkpoint.path))
    yield (
        "decoder layers",
        f"{checkpoint.layers} ({len(checkpoint.kda_layers)} KDA, {len(checkpoint.mla_layers)} MLA; "
        f"{len(checkpoint.moe_layers)} with experts, {len(checkpoint.dense_layers)} dense)",
    )
    yield "experts per layer", str(checkpoint.experts)
    yield "tensors", UNKNOWN if checkpoint.tensor_count is None else f"{checkpoint.tensor_count:,}"
    yield "bytes", size(checkpoint.total_bytes)
    yield "bytes of routed experts", size(checkpoint.routed_expert_bytes)
    for dtype, count in (checkpoint.bytes_by_dtype or {}).items():
        yield f"bytes of {dtype}", size(count)
    states = Counter(shard.state for shard in checkpoint.shards)
    summary = ", ".join(f"{states[state]} {state}" for state in ShardState if states[state])
    yield "shards", summary or "none"
    for shard in checkpoint.shards:
        if shard.state is not ShardState.OK:
            yield (
                f"shard {printable(shard.name)}",
                f"{shard.state}, {size(shard.size)} of {size(shard.expected)}",
            )
    for problem in checkpoint.problems:
        yield "problem" if problem.fatal else "warning", printable(str(problem))


def size(count: int | None) -> str:
    """Bytes, exactly and readably."""
    if count is None:
        return UNKNOWN
    return f"{count:,} ({count / GIB:.2f} GiB)" if count >= GIB else f"{count:,} ({count / MIB:.1f} MiB)"


def print_tables(checkpoint: Checkpoint) -> None:
    """A table on a terminal, else one line per row."""
    console = Console()
    if not console.is_terminal:
        for name, value in rows(checkpoint):
            print(f"{name}: {value}")
        return
    table = Table(show_header=False)
    for name, value in rows(checkpoint):
        # Text: a path may hold what rich would take for markup.
        table.add_row(Text(name), Text(value, style="red" if name == "problem" else ""))
    console.print(table)
