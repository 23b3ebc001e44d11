# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 backends``: which kernels would compute the experts on this machine, and why not others."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kimi_k3.checkpoint import read_config
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.plan.compose import parallelism
from kimi_k3.plan.options import choose
from kimi_k3.plan.sharding import padded_intermediate
from kimi_k3.profiles.load import load_profile
from kimi_k3.words.backends import MARK, Answer, Request, Verdict
from kimi_k3.words.environment import ACCEPT_LOSSY, PREFIX
from kimi_k3.words.python import python_module
from kimi_k3.words.weights import Weights

MODULE = "kimi_k3.engine.backends"
TIMEOUT_SECONDS = 300.0
"""vLLM's imports take 20 s where nothing is cached, and minutes on a network file system."""

_STYLES = {Verdict.CHOSEN: "bold green", Verdict.POSSIBLE: "", Verdict.NO: "dim"}


def run_backends(checkpoint: Path, *, profile_name: str, weights: str | None, as_json: bool) -> int:
    """Ask vLLM in a process of its own, with the profile's environment, and print what it says.

    Returns:
        0 if a back end would be chosen, 1 if none.

    Raises:
        OperatorError: profile or config are wrong, or vLLM could not be asked.
    """
    profile = load_profile(profile_name)
    text = read_config(checkpoint / "config.json").text_config
    cut = parallelism(profile)
    request = Request(
        int4=(profile.weights if weights is None else choose("--weights", weights, Weights)).lossy,
        hidden=text.expert_hidden,
        intermediate=padded_intermediate(text, cut),
        experts=text.num_experts,
        local_experts=text.num_experts // cut.expert_ranks if cut.expert else text.num_experts,
        top_k=text.num_experts_per_token,
    )
    answer = _ask(request, {name: variable.value for name, variable in profile.environment.items()})
    if as_json:
        print(answer.model_dump_json(indent=1))
    else:
        _print(answer, profile_name)
    chosen = any(row.verdict is Verdict.CHOSEN for row in answer.rows)
    return ExitCode.OK if chosen else ExitCode.FAILED


def _ask(request: Request, variables: dict[str, str]) -> Answer:
    try:
        done = subprocess.run(
            python_module(MODULE, request.model_dump_json()),
            env=environment_apart(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OperatorError(
            f"vLLM did not answer within {TIMEOUT_SECONDS:.0f} s",
            remedy="look whether its Python environment is on a slow file system",
        ) from None
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return Answer.model_validate_json(line.removeprefix(MARK))
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    raise OperatorError(
        f"vLLM could not be asked (exit code {done.returncode}): {said[-1][:300] if said else 'silence'}",
        remedy="run kimi-k3 preflight, which finds what is wrong with it",
        exit_code=ExitCode.ENGINE,
    )


def environment_apart(variables: dict[str, str]) -> dict[str, str]:
    """For a process that asks vLLM: with a profile's variables, not as part of a start that may be running.

    Whoever only asks need not consent.
    """
    around = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return {**around, **variables, ACCEPT_LOSSY: "1"}


def _print(answer: Answer, profile_name: str) -> None:
    console = Console()
    where = answer.platform if answer.architecture is None else f"{answer.platform} ({answer.architecture})"
    console.print(f"vLLM {answer.vllm} on {where}, with the environment of profile {profile_name}")
    table = Table("back end", "verdict", "why", box=None, pad_edge=False)
    for row in sorted(answer.rows, key=lambda row: list(Verdict).index(row.verdict)):
        table.add_row(row.name, row.verdict, f"{row.why}\n[dim]{row.what}[/dim]", style=_STYLES[row.verdict])
    console.print(table)
    console.print("Whether a start goes on from there, preflight and the start itself say.")
