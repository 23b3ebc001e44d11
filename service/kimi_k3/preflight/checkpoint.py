# SPDX-License-Identifier: Apache-2.0
"""Profile, checkpoint, consent and fit: what other rooms say of them, as findings."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_k3.checkpoint import Checkpoint
from kimi_k3.checkpoint.preprocessing import code_in
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.plan.consent import require_consent
from kimi_k3.plan.launch import Deployment
from kimi_k3.plan.report import Plan
from kimi_k3.plan.startable import require_startable
from kimi_k3.preflight.finding import Finding, failed, of_error, passed, warned
from kimi_k3.preflight.memory import sized
from kimi_k3.profiles.schema import Profile

PROFILE, CHECKPOINT, CODE, CONSENT, PLAN = "profile", "checkpoint", "checkpoint-code", "consent", "plan"


def check_profile(profile: Profile) -> Finding:
    """One start can be told all that the profile says."""
    try:
        require_startable(profile)
    except OperatorError as error:
        return of_error(PROFILE, error)
    return passed(PROFILE, f"{profile.name} is for one node and one checkpoint")


def check_checkpoint(found: Checkpoint | OperatorError) -> Iterator[Finding]:
    """Everything the inspection found wrong, or one pass."""
    if isinstance(found, OperatorError):
        yield of_error(CHECKPOINT, found)
        return
    for problem in found.problems:
        if problem.fatal:
            yield failed(CHECKPOINT, problem.what, problem.remedy, ExitCode.BAD_CHECKPOINT)
        else:
            yield warned(CHECKPOINT, problem.what, problem.remedy)
    if not found.problems and found.total_bytes is not None:
        size = f"{sized(found.total_bytes)} ({found.total_bytes:,} bytes)"
        yield passed(
            CHECKPOINT, f"{found.path}: {len(found.shards)} shards, {found.tensor_count:,} tensors, {size}"
        )


def check_code(checkpoint: Checkpoint, *, allowed: bool) -> Finding:
    """Python in the checkpoint: allowed where it is needed, and named where it will run.

    Args:
        allowed: whether vLLM gets ``--trust-remote-code``.
    """
    code = code_in(checkpoint.path)
    named = ", ".join(f"{name} (sha256 {digest}...)" for name, digest in code.files) or "none"
    if not allowed and code.needed_by:
        return failed(
            CODE,
            f"{checkpoint.path}: {' and '.join(code.needed_by)} need Python of the checkpoint ({named}), "
            "which the profile does not let vLLM run",
            "take a profile with --trust-remote-code, e.g. ep8, if you trust the source of the checkpoint",
        )
    if allowed and code.files:
        return passed(CODE, f"vLLM may run Python of the checkpoint: {named}")
    return passed(CODE, f"vLLM runs no Python of the checkpoint ({named} there)")


def check_consent(deployment: Deployment) -> Finding:
    """Lossy weights have somebody's consent."""
    if deployment.consent is not None:
        return passed(CONSENT, f"weights {deployment.weights} are lossy; consent by {deployment.consent}")
    try:
        require_consent(deployment.requantisation, flag=False, environment=False)
    except OperatorError as error:
        return of_error(CONSENT, error)
    return passed(CONSENT, f"weights {deployment.weights} are lossless, none is needed")


def check_plan(plan: Plan) -> Iterator[Finding]:
    """The planner's reasons, which are partly estimates: never more than a warning."""
    for reason in plan.reasons:
        yield warned(PLAN, reason, "see kimi-k3 plan for the figures and what can be changed")
    if plan.fits:
        where = f"each of {plan.ranks} ranks" if plan.ranks > 1 else "the one rank"
        yield passed(PLAN, f"weights, cache and a step fit into {where} of profile {plan.profile}")
