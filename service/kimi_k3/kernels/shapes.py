# SPDX-License-Identifier: Apache-2.0
"""The shapes of routed experts that AITER is asked for on one rank of a deployment. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_k3.checkpoint import TextConfig
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.plan.compose import parallelism, usual_gpu
from kimi_k3.plan.sharding import padded_intermediate
from kimi_k3.profiles.schema import Architecture, Profile
from kimi_k3.words.gpus import Gpu
from kimi_k3.words.weights import Weights

ARCHITECTURE = Architecture.GFX942.value
"""The only one: others compute with MXFP4, or are not known here."""

STEP, REQUESTS = "--max-num-batched-tokens", "--max-num-seqs"

TIERS = (32768, 131072)
"""From the first on AITER no longer rounds a number of tokens up to a power of two, but down to one of these
(``get_padded_M``, aiter/fused_moe.py)."""


@dataclass(frozen=True, kw_only=True)
class MoeShape:
    """Routed experts of a layer on one rank.

    Attributes:
        model_dim: width of an expert's input and output.
        inter_dim: width between its two projections, on this rank.
        experts: held by this rank.
        topk: experts of a token, of all ranks: what kernels are launched with.
        masked: whether other ranks hold experts, too (expert parallelism).
        tokens: padded sizes of a step, as AITER looks rows up.
    """

    model_dim: int
    inter_dim: int
    experts: int
    topk: int
    masked: bool
    tokens: tuple[int, ...]


def require_int4_on_gfx942(profile: Profile) -> Gpu:
    """The GPU that a profile's int4 kernels are for.

    Raises:
        OperatorError: it serves something else, or elsewhere.
    """
    gpu = usual_gpu(profile)
    why = None
    if gpu is None:
        why = "runs on a CPU"
    elif gpu.architecture != ARCHITECTURE:
        why = f"is for {gpu.architecture}"
    elif profile.weights is not Weights.INT4:
        why = f"serves {profile.weights}"
    if gpu is None or why is not None:
        raise OperatorError(
            f"--profile {profile.name}: {why}; kernels are compiled ahead for int4 on {ARCHITECTURE} only",
            remedy="leave this step out, or take another profile, e.g. ep8",
            exit_code=ExitCode.USAGE,
        )
    return gpu


def moe_shapes(text: TextConfig, profile: Profile) -> tuple[MoeShape, ...]:
    """The shapes of a profile: one, or two where the experts cannot be divided evenly.

    Raises:
        OperatorError: the profile does not say how large a step may be.
    """
    cut = parallelism(profile)
    least, rest = divmod(text.num_experts, cut.expert_ranks) if cut.expert else (text.num_experts, 0)
    return tuple(
        MoeShape(
            model_dim=text.expert_hidden,
            inter_dim=padded_intermediate(text, cut),
            experts=experts,
            topk=text.num_experts_per_token,
            masked=cut.expert and cut.expert_ranks > 1,
            # Data-parallel engines hand each other their tokens, and each computes with its experts for all.
            tokens=padded_sizes(cut.data * max(_count(profile, STEP), _count(profile, REQUESTS))),
        )
        for experts in ((least + 1, least) if rest else (least,))
        if experts
    )


def padded_size(tokens: int) -> int:
    """Under how many tokens AITER looks a step of ``tokens`` up."""
    if tokens < TIERS[0]:
        return 1 << (tokens - 1).bit_length()
    return max(tier for tier in TIERS if tier <= tokens)


def padded_sizes(most: int) -> tuple[int, ...]:
    """Those of all steps of up to ``most`` tokens."""
    powers = (1 << exponent for exponent in range(TIERS[0].bit_length()))
    return tuple(size for size in (*powers, *TIERS[1:]) if size <= padded_size(most))


def _count(profile: Profile, name: str) -> int:
    flag = profile.flags.get(name)
    if flag is None or not isinstance(flag.value, int):
        raise OperatorError(
            f"profile {profile.name}: sets no {name}, so nobody knows how many tokens a step has",
            remedy=f"add {name} to the profile",
            exit_code=ExitCode.USAGE,
        )
    return flag.value
