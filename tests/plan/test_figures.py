# SPDX-License-Identifier: Apache-2.0
"""Figures in the profiles' reasons are those of their plans."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kimi_k3.plan.cache import cache_layout
from kimi_k3.plan.compose import parallelism, usual_gpu
from kimi_k3.plan.memory import attention_workspace_bytes
from kimi_k3.plan.sharding import Parallelism, rank_weights
from kimi_k3.plan.storage import reading
from kimi_k3.profiles.load import load_profile, profile_names
from kimi_k3.profiles.schema import Profile
from kimi_k3.words.gpus import GIB

from ..checkpoint.imitation import published_config

CONFIG = published_config()
ON_GPUS = [name for name in profile_names() if load_profile(name).gpu is not None]
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
FIGURE = re.compile(r"(?:(\d+(?:\.\d+)?) of )?(\d+(?:\.\d+)?) (KiB|MiB|GiB|TiB)")
TOLERANCE = 0.02

PUBLISHED = {
    "16 GiB": "MoRI's heap, ROCm/MAD",
    "896 MiB": "AITER's output for 8192 tokens, KVM-paper",
    "1.9 GiB": "with HSA_NO_SCRATCH_RECLAIM, KVM-paper",
    "137.5 GiB": "ROCm/MAD",
    "192.5 GiB": "vllm-project/vllm#51274",
}
"""Figures that no plan computes, and whose they are."""


def reasons(profile: Profile) -> Iterator[str]:
    """All that is printed beside a profile's values."""
    assert profile.gpu is not None
    yield from (profile.summary, profile.sizes_why, profile.gpu.why)
    yield from (flag.why for flag in profile.flags.values())
    yield from (variable.why for variable in profile.environment.values())


def computed(profile: Profile) -> Iterator[float]:
    """Bytes that a reason may name."""
    gpu, cut, text = usual_gpu(profile), parallelism(profile), CONFIG.text_config
    assert gpu is not None
    whole = rank_weights(CONFIG, Parallelism(data=16, expert=True), vision=False)
    rank = rank_weights(CONFIG, cut, vision="--language-model-only" not in profile.flags)
    others = rank.sharded + rank.replicated
    yield from (rank.loaded, rank.converted, rank.converted - rank.loaded, others, rank.replicated)
    yield from (whole.loaded, whole.sharded + whole.replicated)
    yield rank_weights(CONFIG, cut).vision
    nominal = next(size for size in (192, 256, 288) if size * GIB >= gpu.memory_bytes) * GIB
    share = float(profile.flags["--gpu-memory-utilization"].value or 0)
    # One node's GPUs are compared with a smaller kind.
    yield from (192 * GIB, nominal, share * nominal, (1 - share) * nominal)
    longest, requests = (
        int(profile.flags[name].value or 0) for name in ("--max-model-len", "--max-num-seqs")
    )
    layout = cache_layout(text, cut)
    alone = cache_layout(text, replace(cut, decode_context=1))
    # The second of two stages has the more MLA layers.
    second = 13 / 11 if cut.pipeline == 2 else 1
    for each in (layout.bytes_per_token, alone.bytes_per_token, second * layout.bytes_per_token):
        yield from (each, each * longest)
    yield from (layout.state_bytes, layout.state_bytes * requests)
    yield attention_workspace_bytes(text, cut, gpu, max_num_seqs=1, max_model_len=longest)
    if (given := profile.flags.get("--kv-cache-memory-bytes")) is not None:
        yield int(given.value or 0)
    read = reading(CONFIG, Parallelism(tensor=8, expert=True), ranks_per_node=8, expert_filter=True)
    yield from (read.distinct, read.distinct - read.rank)


@pytest.mark.parametrize("name", ON_GPUS)
def test_figures_in_reasons(name: str) -> None:
    """A reason whose figure the plan contradicts, a line above it, is believed by nobody, or wrongly."""
    profile = load_profile(name)
    known = list(computed(profile))
    wrong = []
    for reason in reasons(profile):
        for part, figure, unit in FIGURE.findall(" ".join(reason.split())):
            for number in filter(None, (part, figure)):
                if f"{number} {unit}" in PUBLISHED:
                    continue
                digit = 0.5 * 10.0 ** -len(number.partition(".")[2])
                size, rounded = float(number) * UNITS[unit], digit * UNITS[unit]
                if not any(abs(size - each) <= max(TOLERANCE * each, rounded) for each in known):
                    wrong.append(f"{number} {unit}: {reason}")
    assert wrong == []


def test_published_figures_are_named_somewhere() -> None:
    """A list of exceptions only grows, unless something holds against it."""
    told = " ".join(" ".join(reason.split()) for name in ON_GPUS for reason in reasons(load_profile(name)))
    assert [figure for figure in PUBLISHED if figure not in told] == []


def test_what_was_published_of_sixteen_ranks() -> None:
    """137.5 GiB (ROCm/MAD) is a sixteenth of the MXFP4 experts and half of all else, image encoder included.

    vLLM does not halve all else: what it keeps whole on both GPUs is the difference, beside int4's scales.
    """
    cut = parallelism(load_profile("dp-ep16"))
    alone = rank_weights(CONFIG, Parallelism(data=16, expert=True))
    experts = alone.expert_codes + alone.expert_scales
    assert (experts + (alone.loaded - experts) / 2) / GIB == pytest.approx(137.5, abs=0.05)
    ours = rank_weights(CONFIG, cut)
    assert ours.loaded - (ours.replicated + ours.vision) / 2 == pytest.approx(137.5 * GIB, rel=0.001)
