# SPDX-License-Identifier: Apache-2.0
"""What an operator may choose for one start, and how it becomes a decided deployment. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from kimi_k3.errors import ExitCode, OperatorError, nearest
from kimi_k3.plan.budget import hang_timeout_seconds
from kimi_k3.plan.consent import require_consent
from kimi_k3.plan.launch import Deployment
from kimi_k3.plan.nodes import place
from kimi_k3.plan.overrides import changed
from kimi_k3.profiles.schema import Profile
from kimi_k3.words.given import require_text
from kimi_k3.words.tls import Certificate
from kimi_k3.words.weights import Requantisation, ScaleRule, Weights

MAX_RANKS = 1024
MAX_TOKENS = 2**31 - 1
MAX_REQUESTS = 65536
MAX_SECONDS = 7 * 24 * 3600
"""Far above anything that serves; what lies beyond overflows somewhere between here and a kernel."""

LOSSY_PROFILE = "ep8"
"""Where an operator is sent who wants int4 from a profile that has none."""

Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line of one start; ``None`` means the profile decides.

    ``settings`` are changes of the profile, ``name=value`` each: see :func:`overrides.with_settings`.
    """

    checkpoint: Path
    host: str
    port: int
    served_model_name: str
    weights: str | None = None
    scale_rule: str | None = None
    negative_scale: bool = True
    allow_nonfinite: bool = False
    accept_lossy: bool = False
    tensor_parallel_size: int | None = None
    expert_parallel: bool | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    dtype: str | None = None
    start_timeout: float | None = None
    drain_timeout: float | None = None
    readiness_delay: float | None = None
    hang_timeout: float | None = None
    tls: Certificate | None = None
    node_rank: int | None = None
    leader_address: str | None = None
    leader_port: int | None = None
    settings: tuple[str, ...] = ()


def decide(
    options: Options,
    profile: Profile,
    *,
    state_dir: Path,
    socket_dir: Path,
    start_id: str,
    consent_in_environment: bool,
    guarded: bool = False,
) -> Deployment:
    """The deployment that ``options`` and ``profile`` make together.

    Args:
        guarded: whether an API key is set.

    Raises:
        OperatorError: a value is not possible (names it and the nearest possible one), or the
            weights are lossy and nobody consented.
    """
    weights = profile.weights if options.weights is None else choose("--weights", options.weights, Weights)
    requantisation = _requantisation(options, profile, weights)
    if not 1 <= options.port <= 65535:
        raise _usage(f"--port {options.port}: is not a port", "give one from 1 to 65535")
    for flag, count, most in (
        ("--tensor-parallel-size", options.tensor_parallel_size, MAX_RANKS),
        ("--max-model-len", options.max_model_len, MAX_TOKENS),
        ("--max-num-seqs", options.max_num_seqs, MAX_REQUESTS),
    ):
        if count is not None and not 1 <= count <= most:
            size = "small" if count < 1 else "large"
            raise _usage(f"{flag} {count}: is too {size}", f"give 1 to {most}, or leave it to the profile")
    profile = _with_choices(profile, options)
    start_timeout = _seconds(
        "--start-timeout", options.start_timeout, profile.start_timeout_seconds, zero=False
    )
    require_text("checkpoint", str(options.checkpoint))
    # Once more, since a symlink on the way may have brought in another name.
    require_text("state directory", str(state_dir))
    return Deployment(
        profile=profile,
        checkpoint=options.checkpoint,
        state_dir=state_dir,
        socket_dir=socket_dir,
        start_id=start_id,
        weights=weights,
        requantisation=requantisation,
        consent=require_consent(
            requantisation, flag=options.accept_lossy, environment=consent_in_environment
        ),
        host=_word("--host", options.host),
        port=options.port,
        served_model_name=_word("--served-model-name", options.served_model_name),
        tensor_parallel_size=profile.tensor_parallel_size,
        expert_parallel=profile.expert_parallel,
        start_timeout=start_timeout,
        drain_timeout=_seconds(
            "--drain-timeout", options.drain_timeout, profile.drain_timeout_seconds, zero=True
        ),
        readiness_delay=_seconds(
            "--readiness-delay", options.readiness_delay, profile.readiness_delay_seconds, zero=True
        ),
        hang_timeout=_seconds(
            "--hang-timeout", options.hang_timeout, hang_timeout_seconds(start_timeout), zero=False
        ),
        guarded=guarded,
        tls=options.tls,
        place=place(profile, options.node_rank, options.leader_address, options.leader_port),
    )


def _with_choices(profile: Profile, options: Options) -> Profile:
    """The profile with what the command line changes; the profile's rules hold for that, too."""
    for flag, name, value in (
        ("--tensor-parallel-size", "tensor_parallel_size", options.tensor_parallel_size),
        ("--expert-parallel", "expert_parallel", options.expert_parallel),
        ("--max-model-len", "--max-model-len", options.max_model_len),
        ("--max-num-seqs", "--max-num-seqs", options.max_num_seqs),
        ("--dtype", "--dtype", options.dtype),
    ):
        if value is not None:
            given = f"{flag} {value}"
            if isinstance(value, bool):
                given = flag if value else flag.replace("--", "--no-", 1)
            profile = changed(profile, {name: value}, given=given)
    return profile


def requantisation(
    flag: str, rule: str | ScaleRule, *, negative_scale: bool, allow_nonfinite: bool
) -> Requantisation:
    """How MXFP4 becomes int4, as an operator said it.

    Args:
        flag: that named the rule.
        rule: its value.
        negative_scale: ``False`` after ``--no-negative-scale``.
        allow_nonfinite: ``True`` after ``--allow-nonfinite``.

    Raises:
        OperatorError: there is no such rule, or another flag has no effect with it.
    """
    chosen = choose(flag, rule, ScaleRule)
    if chosen is ScaleRule.AMAX and not negative_scale:
        raise _usage(
            f"--no-negative-scale has no effect with {flag} {chosen}, whose scales are all positive",
            "leave it out",
        )
    return Requantisation(
        rule=chosen,
        negative_scale=negative_scale and chosen is ScaleRule.MSE,
        allow_nonfinite=allow_nonfinite,
    )


def _requantisation(options: Options, profile: Profile, weights: Weights) -> Requantisation | None:
    if weights.lossy:
        if profile.scale_rule is None:
            raise _usage(
                f"--weights {weights}: profile {profile.name} is for experts as they are",
                f"leave it out, or take --profile {LOSSY_PROFILE}",
            )
        return requantisation(
            "--scale-rule",
            options.scale_rule or profile.scale_rule,
            negative_scale=options.negative_scale,
            allow_nonfinite=options.allow_nonfinite,
        )
    for flag, given in (
        ("--scale-rule", options.scale_rule is not None),
        ("--no-negative-scale", not options.negative_scale),
        ("--allow-nonfinite", options.allow_nonfinite),
    ):
        if given:
            raise _usage(
                f"{flag} has no effect with weights {weights}, which are served as they are",
                f"leave it out, or use --weights {Weights.INT4}",
            )
    return None


def choose(flag: str, given: str, choices: type[Choice]) -> Choice:
    """The choice that an operator named.

    Raises:
        OperatorError: there is no such choice; names the nearest.
    """
    try:
        return choices(given)
    except ValueError:
        raise _usage(
            f"{flag} {given!r}: there is no such choice", nearest(given, [choice.value for choice in choices])
        ) from None


def _word(flag: str, value: str) -> str:
    """A word that vLLM's parser cannot take for a flag or for several values."""
    if not value or value.startswith("-") or value != "".join(value.split()):
        raise _usage(f"{flag} {value!r}: must be one word that does not begin with -", "give another one")
    return require_text(flag, value)


def _seconds(flag: str, given: float | None, default: float, *, zero: bool) -> float:
    value = default if given is None else given
    if not 0 <= value <= MAX_SECONDS or (value == 0 and not zero):
        raise _usage(
            f"{flag} {value}: is not a possible number of seconds",
            f"give {'0 or more' if zero else 'more than 0'}, at most {MAX_SECONDS} (7 days)",
        )
    return value


def _usage(what: str, remedy: str) -> OperatorError:
    return OperatorError(what, remedy=remedy, exit_code=ExitCode.USAGE)
