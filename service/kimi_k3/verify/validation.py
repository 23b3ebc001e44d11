# SPDX-License-Identifier: Apache-2.0
"""What upstream validated when int4 on gfx942 came to vLLM, and what our results say of each check. Pure.

vllm-project/vllm#51274 names its checks in its description; the last two it calls pending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kimi_k3.verify.results import Kind, Result, Row, State


@dataclass(frozen=True)
class Check:
    """One of the checks.

    Attributes:
        name: what is to be shown.
        kind: whose result shows it; ``None`` for what this version cannot run.
        rows: which of that result's rows belong to it, by name.
        else_: what to do, or why it cannot be done, where there is no such result.
    """

    name: str
    kind: Kind | None
    rows: Callable[[str], bool]
    else_: str


def _any(_: str) -> bool:
    return True


CHECKS = (
    Check(
        "kernel against float32: hidden 3584, intermediate 3072, 112 experts, 15 a token, 1 to 32 tokens",
        Kind.KERNEL,
        lambda name: name == "production shape on gfx942",
        "kimi-k3 verify kernel --profile ep8, on a node before a start",
    ),
    Check(
        "kernel against float32, as it was run",
        Kind.KERNEL,
        lambda name: "against float32" in name,
        "kimi-k3 verify kernel",
    ),
    Check(
        "graphs are captured",
        Kind.SMOKE,
        lambda name: name == "graphs",
        "kimi-k3 verify all",
    ),
    Check(
        "answers, consent and metrics",
        Kind.SMOKE,
        lambda name: name != "graphs",
        "kimi-k3 verify all",
    ),
    Check(
        "GSM8K, five-shot",
        Kind.GSM8K,
        lambda name: name.startswith("GSM8K"),
        "kimi-k3 verify gsm8k --dataset PATH",
    ),
    Check(
        "the miniature's own word problems, as GSM8K is asked (not upstream's)",
        Kind.GSM8K,
        lambda name: name.startswith("own word problems"),
        "kimi-k3 verify gsm8k --own",
    ),
    Check("vllm bench serve without errors", Kind.BENCH, _any, "kimi-k3 verify bench"),
    Check(
        "accuracy of int4 against the exact weights",
        Kind.ACCURACY,
        lambda name: name.startswith("accuracy lost"),
        "kimi-k3 verify accuracy",
    ),
    Check("long contexts (upstream: pending)", Kind.LONG, _any, "kimi-k3 verify long"),
    Check(
        "DSpark speculative decoding (upstream: pending)",
        None,
        _any,
        "profile ep8-dspark cannot be started yet (docs/profiles.md)",
    ),
)


def validation(results: Sequence[Result]) -> list[Row]:
    """A row for each check: fail if anything of it does, pass if something did, else not run."""
    by_kind = {result.kind: result for result in results}
    return [_row(check, by_kind.get(check.kind) if check.kind is not None else None) for check in CHECKS]


def _row(check: Check, result: Result | None) -> Row:
    if result is None:
        return Row(name=check.name, state=State.NOT_RUN, evidence=check.else_)
    rows = [row for row in result.rows if check.rows(row.name)]
    if result.broken_off is not None:
        return Row(name=check.name, state=State.FAIL, evidence=f"broken off: {result.broken_off}")
    states = [row.state for row in rows]
    state = next((one for one in (State.FAIL, State.PASS) if one in states), State.NOT_RUN)
    telling = [row for row in rows if row.state is state]
    if not telling:
        return Row(name=check.name, state=State.NOT_RUN, evidence=check.else_)
    more = f" (and {len(telling) - 1} more)" if len(telling) > 1 else ""
    where = f"{result.subject.served_as}, {result.subject.hardware or 'unknown hardware'}"
    return Row(
        name=check.name,
        state=state,
        evidence=f"{telling[0].name}: {telling[0].evidence}{more} [{where}]",
    )
