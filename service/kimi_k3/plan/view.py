# SPDX-License-Identifier: Apache-2.0
"""A plan for people: its verdict, tables, a picture of a rank's memory, and the command."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kimi_k3.plan.memory import gib
from kimi_k3.plan.report import PerRank, Plan

BAR_WIDTH = 60
MEMORY_ENDS = "|"
"""Where a GPU's memory ends, in a bar of parts that exceed it."""

PARTS = (
    # Attribute of PerRank, what it is, its sign in the bar, its colour.
    ("expert_bytes_after_conversion", "routed experts", "#", "cyan"),
    ("other", "other weights", "=", "blue"),
    ("process_estimated_bytes", "process (estimated)", "p", "magenta"),
    ("step_estimated_bytes", "a step's peak (estimated)", "s", "yellow"),
    ("cache_bytes", "cache", "c", "green"),
    ("withheld_bytes", "left to others", ".", "bright_black"),
)
"""The parts of a GPU's memory, in the order of the bar."""


def print_plan(plan: Plan, script: str) -> None:
    """Write a plan to the terminal, or as plain lines into a pipe.

    Args:
        plan: the figures.
        script: the launch as a shell script.
    """
    console = Console()
    verdict = "fits" if plan.fits else "does not fit"
    where = (
        f"{plan.ranks} x {plan.gpu}" if plan.gpu else f"{plan.ranks} rank{'s' * (plan.ranks > 1)} on a CPU"
    )
    nodes = f" on {plan.nodes} nodes" if plan.nodes > 1 else ""
    later = "" if plan.startable else ", but cannot be started yet"
    _say(
        console,
        f"{plan.profile}, {plan.weights} experts, {where}{nodes}: {verdict}{later}",
        style="bold green" if plan.fits else "bold red",
    )
    for reason in plan.reasons:
        _say(console, reason, style="red", indent=2)
    if plan.per_rank.gpu_bytes:
        _print_bar(console, plan.per_rank, plan.per_rank.gpu_bytes)
    for title, rows in (("memory of a rank", _memory(plan)), ("cache of a rank", _cache(plan)),
                        ("reading", _reading(plan)), ("seconds", _seconds(plan))):  # fmt: skip
        _print_rows(console, title, rows)
    for note in plan.notes:
        _say(console, f"note: {note}")
    print(f"\n{script}")


def bar(rank: PerRank, gpu_bytes: int, width: int = BAR_WIDTH) -> list[tuple[str, str]]:
    """Signs and colours of the bar, ``width`` cells; what is too much is behind :data:`MEMORY_ENDS`."""
    sizes = [_part(rank, name) for name, *_ in PARTS]
    whole = max(gpu_bytes, sum(sizes))
    limit = round(gpu_bytes / whole * width) if whole > gpu_bytes else width + 1
    begin, total = 0, 0
    cells: list[tuple[str, str]] = []
    for (_, _, sign, colour), size in zip(PARTS, sizes, strict=True):
        total += size
        end = round(total / whole * width)
        if begin < limit <= end:
            inside = limit - begin - 1
            cells += [(sign * inside, colour), (MEMORY_ENDS, "bold red")]
            begin = limit
        cells.append((sign * (end - begin), colour))
        begin = end
    return cells


def _say(console: Console, text: str, *, style: str = "", indent: int = 0) -> None:
    """A paragraph: in a terminal as wide as that, in a pipe one line."""
    if console.is_terminal:
        console.print(Padding(Text(text, style=style), (0, 0, 0, indent), expand=False))
    else:
        console.print(Text(" " * indent + text, style=style), soft_wrap=True)


def _part(rank: PerRank, name: str) -> int:
    if name == "other":
        return rank.weights_bytes - rank.expert_bytes_after_conversion
    value: int | None = getattr(rank, name)
    return value or 0


def _print_bar(console: Console, rank: PerRank, gpu_bytes: int) -> None:
    excess = sum(_part(rank, name) for name, *_ in PARTS) - gpu_bytes
    tail = f"] {gib(gpu_bytes)}"
    room = console.width - len(tail) - 1 if console.is_terminal else BAR_WIDTH
    line = Text("[")
    for signs, colour in bar(rank, gpu_bytes, max(1, min(BAR_WIDTH, room))):
        line.append(signs, style=colour)
    line.append(tail)
    console.print(line, soft_wrap=True)
    if excess > 0:
        _say(console, f"{MEMORY_ENDS} the memory ends: {gib(excess)} are missing", style="bold red", indent=2)
    for name, title, sign, colour in PARTS:
        if size := _part(rank, name):
            _say(console, f"{sign} {title}: {gib(size)}", style=colour, indent=2)


def _print_rows(console: Console, title: str, rows: Iterator[tuple[str, str]]) -> None:
    if not console.is_terminal:
        for name, value in rows:
            print(f"{title}: {name}: {value}")
        return
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(Text(name), Text(value, justify="right"))
    console.print(table)


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    rank = plan.per_rank
    yield "weights before the conversion", _sized(rank.resident_before_conversion_bytes)
    yield "weights after it", _sized(rank.resident_after_conversion_bytes)
    yield "most on the way", _sized(rank.conversion_peak_bytes)
    yield "of them routed experts", _sized(rank.expert_bytes_after_conversion)
    yield "of them cut among the ranks", _sized(rank.sharded_bytes)
    yield "of them whole on every rank", _sized(rank.replicated_bytes + rank.vision_bytes)


def _cache(plan: Plan) -> Iterator[tuple[str, str]]:
    kv = plan.kv
    yield "a token", gib(kv.bytes_per_token)
    yield "states of a sequence, however long", gib(kv.state_bytes_per_sequence)
    yield "--max-model-len", f"{kv.max_model_len:,} tokens"
    yield "sequences of --max-model-len that fit whole", _count(kv.largest_max_num_seqs)
    yield "tokens in sequences of --max-model-len (in vLLM's log)", _count(kv.tokens)
    yield "tokens in one sequence alone (fewer states beside it)", _count(kv.largest_max_model_len)


def _reading(plan: Plan) -> Iterator[tuple[str, str]]:
    read = plan.storage
    yield "a rank asks for", _sized(read.rank_bytes)
    yield "all ranks of a node ask for", _sized(read.node_bytes)
    yield "of them different bytes", _sized(read.distinct_bytes)
    if read.seconds_if_cached is not None and read.seconds_if_not_cached is not None:
        yield "time if memory keeps what is read twice", _duration(read.seconds_if_cached)
        yield "time if it does not", _duration(read.seconds_if_not_cached)


def _seconds(plan: Plan) -> Iterator[tuple[str, str]]:
    for name, value in plan.budgets.items():
        yield name.replace("_", " "), f"{value:,}"


def _sized(size: int) -> str:
    return gib(size, digits=2)


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
