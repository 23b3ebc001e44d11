# SPDX-License-Identifier: Apache-2.0
"""A plan for people: its verdict, tables, a picture of a rank's memory, and the command."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kimi_k3.plan.report import PerRank, Plan
from kimi_k3.words.gpus import GIB

BAR_WIDTH = 60

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
    console.print(
        Text(f"{plan.profile}, {plan.weights} experts, {where}{nodes}: {verdict}"),
        style="bold green" if plan.fits else "bold red",
        soft_wrap=True,
    )
    for reason in plan.reasons:
        console.print(Text(f"  {reason}"), style="red", soft_wrap=True)
    if plan.per_rank.gpu_bytes:
        _print_bar(console, plan.per_rank, plan.per_rank.gpu_bytes)
    for title, rows in (("memory of a rank", _memory(plan)), ("cache of a rank", _cache(plan)),
                        ("reading", _reading(plan)), ("seconds", _seconds(plan))):  # fmt: skip
        _print_rows(console, title, rows)
    for note in plan.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    print(f"\n{script}")


def bar(rank: PerRank, gpu_bytes: int, width: int = BAR_WIDTH) -> list[tuple[str, str]]:
    """Signs and colours of the bar: ``width`` cells, or more if the parts exceed the memory."""
    ends, total, cells = 0, 0, []
    for name, _, sign, colour in PARTS:
        total += _part(rank, name)
        end = round(total / gpu_bytes * width)
        cells.append((sign * (end - ends), colour))
        ends = end
    return cells


def _part(rank: PerRank, name: str) -> int:
    if name == "other":
        return rank.weights_bytes - rank.expert_bytes_after_conversion
    value: int | None = getattr(rank, name)
    return value or 0


def _print_bar(console: Console, rank: PerRank, gpu_bytes: int) -> None:
    line = Text("[")
    for signs, colour in bar(rank, gpu_bytes):
        line.append(signs, style=colour)
    line.append(f"] {gpu_bytes / GIB:.1f} GiB")
    console.print(line, soft_wrap=True)
    for name, title, sign, colour in PARTS:
        if size := _part(rank, name):
            console.print(Text(f"  {sign} {title}: {size / GIB:.1f} GiB", style=colour), soft_wrap=True)


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
    yield "weights before the conversion", _gib(rank.resident_before_conversion_bytes)
    yield "weights after it", _gib(rank.resident_after_conversion_bytes)
    yield "most on the way", _gib(rank.conversion_peak_bytes)
    yield "of them routed experts", _gib(rank.expert_bytes_after_conversion)
    yield "of them cut among the ranks", _gib(rank.sharded_bytes)
    yield "of them whole on every rank", _gib(rank.replicated_bytes + rank.vision_bytes)


def _cache(plan: Plan) -> Iterator[tuple[str, str]]:
    kv = plan.kv
    yield "bytes per token", f"{kv.bytes_per_token:,}"
    yield "bytes per sequence, beside", f"{kv.state_bytes_per_sequence:,}"
    yield "tokens", _count(kv.tokens)
    yield "--max-model-len", f"{kv.max_model_len:,}"
    yield "largest --max-model-len", _count(kv.largest_max_model_len)
    yield "whole sequences of that length at a time", _count(kv.largest_max_num_seqs)


def _reading(plan: Plan) -> Iterator[tuple[str, str]]:
    read = plan.storage
    yield "a rank asks for", _gib(read.rank_bytes)
    yield "all ranks of a node ask for", _gib(read.node_bytes)
    yield "of them different bytes", _gib(read.distinct_bytes)
    if read.seconds_if_cached is not None and read.seconds_if_not_cached is not None:
        yield "time if memory keeps what is read twice", _duration(read.seconds_if_cached)
        yield "time if it does not", _duration(read.seconds_if_not_cached)


def _seconds(plan: Plan) -> Iterator[tuple[str, str]]:
    for name, value in plan.budgets.items():
        yield name.replace("_", " "), f"{value:,}"


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB"


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
