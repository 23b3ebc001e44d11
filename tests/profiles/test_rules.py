# SPDX-License-Identifier: Apache-2.0
"""What serves garbage, is ignored or ends an hour's loading cannot be written into a profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from kimi_k3.errors import OperatorError
from kimi_k3.profiles.load import load_profile, parse_profile, profile_names
from kimi_k3.profiles.rules import (
    PLANNED_FLAGS,
    PLANNED_VARIABLES,
    REFUSED_FLAGS,
    REFUSED_VARIABLES,
    refused_flag,
)
from kimi_k3.profiles.schema import Architecture, Profile
from kimi_k3.words.weights import Weights

Change = Callable[[dict[str, Any]], None]

WHY = "a reason that is long enough"


def refusal(name: str, change: Change) -> str:
    """The one line with which a changed profile is refused."""
    document = load_profile(name).model_dump(mode="json", exclude_none=False)
    document["extends"] = None
    change(document)
    with pytest.raises(OperatorError) as caught:
        parse_profile(yaml.safe_dump(document), name=name)
    assert "\n" not in str(caught.value)
    assert f"{name}.yaml" in str(caught.value)
    return str(caught.value)


def flag(name: str, value: object = None) -> Change:
    return lambda document: document["flags"].update({name: {"value": value, "why": WHY}})


def variable(name: str, value: str = "1") -> Change:
    return lambda document: document["environment"].update({name: {"value": value, "why": WHY}})


def without(table: str, name: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        del document[table][name]

    return change


def key(name: str, value: object) -> Change:
    return lambda document: document.update({name: value})


def both(first: Change, second: Change) -> Change:
    def change(document: dict[str, Any]) -> None:
        first(document)
        second(document)

    return change


@pytest.mark.parametrize("name", profile_names())
def test_unchanged_profiles_pass_the_same_way(name: str) -> None:
    """The refusals below come from the change, not from how the test writes the profile."""
    document = load_profile(name).model_dump(mode="json")
    document["extends"] = None
    assert parse_profile(yaml.safe_dump(document), name=name).flags == load_profile(name).flags


@pytest.mark.parametrize("name", sorted(REFUSED_FLAGS.keys() | PLANNED_FLAGS))
def test_a_refused_flag_and_its_negation(name: str) -> None:
    """``--no-enable-expert-parallel`` decides the same thing as the flag that it negates."""
    assert name in refusal("ep8", flag(name, "x"))
    negation = name.replace("--", "--no-", 1)
    assert negation in refusal("ep8", flag(negation))


def test_negations_as_vllm_0_33_spells_them() -> None:
    """0.33 accepts ``--disable-x`` as well as ``--no-enable-x``."""
    assert refused_flag("--disable-expert-parallel") is not None
    assert refused_flag("--enable-cascade-attn") is not None
    assert refused_flag("--no-enable-prefix-caching") is None


@pytest.mark.parametrize("name", sorted(REFUSED_VARIABLES.keys() | PLANNED_VARIABLES))
def test_a_refused_variable(name: str) -> None:
    """Each half of the pair that corrupts silently, what 0.33 no longer reads, secrets, a cluster's names."""
    assert name in refusal("ep8", variable(name))


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("ep8", variable("AITER_SITUV2_A8W4"), "vllm-project/recipes#859"),
        ("ep8", variable("VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4"), "vllm-project/recipes#859"),
        ("ep8", variable("VLLM_ROCM_USE_AITER_MOE_SITUV2", "a8w4"), "a8w4 with int4 experts serves garbage"),
        ("ep8", variable("VLLM_ROCM_USE_AITER_MOE_SITUV2", "auto"), "gfx942 has only a16w4"),
        (
            "ep8",
            without("environment", "VLLM_ROCM_USE_AITER_MOE_SITUV2"),
            "needs VLLM_ROCM_USE_AITER_MOE_SITUV2",
        ),
        ("ep8", variable("VLLM_ROCM_USE_AITER", "0"), "VLLM_ROCM_USE_AITER=1"),
        (
            "ep8",
            both(key("left_open", {}), variable("VLLM_ROCM_USE_AITER_MOE", "0")),
            "otherwise int4 is ignored",
        ),
        ("ep8", without("environment", "VLLM_ROCM_USE_AITER_MLA"), "vllm-project/vllm#51964"),
        ("ep8", without("flags", "--logprobs-mode"), "ROCm/aiter#4830"),
        ("ep8", variable("VLLM_ROCM_USE_AITER_FP4BMM"), "gfx950"),
        ("ep8", variable("VLLM_ROCM_USE_AITER_FP8BMM"), "needs VLLM_ROCM_USE_AITER_FP8BMM=0"),
        ("ep8", both(key("left_open", {}), flag("--kv-cache-dtype", "fp8")), "--kv-cache-dtype fp8"),
        ("ep8", flag("--attention-backend", "CPU_MLA"), "reads a CPU's cache"),
        ("cpu-tiny", flag("--attention-backend", "TRITON_MLA"), "must be CPU_MLA"),
        ("ep8", flag("--enable-eplb"), "--enable-ep-weight-filter with --enable-eplb"),
        ("tp8", flag("--enable-eplb"), "--enable-eplb needs expert_parallel"),
        ("tp8", flag("--enable-ep-weight-filter"), "no effect without expert_parallel"),
        ("ep8", flag("--safetensors-load-strategy", "prefetch"), "--safetensors-load-strategy lazy"),
        ("ep8", without("flags", "--safetensors-load-strategy"), "--safetensors-load-strategy lazy"),
        ("ep8", flag("--mm-encoder-tp-mode", "data"), "no effect with --language-model-only"),
        ("ep8", without("flags", "--tool-call-parser"), "need each other"),
        ("ep8", without("flags", "--enable-auto-tool-choice"), "need each other"),
        ("ep8", flag("--max-num-seqs", 512), "512 ran out of memory"),
        ("ep8", flag("--max-num-seqs", 257), "at most 256"),
        ("ep8", flag("--max-num-batched-tokens", 63), "63: is less than --max-num-seqs 64"),
        ("ep8", flag("--block-size", 24), "24: must be a multiple of 16"),
        ("ep8", flag("--dtype"), "--dtype: needs a value"),
        ("ep8", flag("--language-model-only", 1), "--language-model-only 1: is a switch"),
        ("ep8", flag("--max-model-len", 1.5), "--max-model-len 1.5: must be a whole number"),
        ("ep8", flag("--tool-call-parser", "kimi_k2"), "kimi_k2: is no choice"),
        ("ep8-dspark", flag("--speculative-config", "{"), "must be a JSON object"),
        ("dp-ep16", flag("--distributed-executor-backend", "ray"), "ray: is no choice"),
        ("dp-ep16", both(key("data_parallel_size", 5), lambda d: d["gpu"].update(per_node=5)), "evenly"),
        ("cpu-tiny", flag("--max-num-seqs", 1025), "1024: is less than --max-num-seqs 1025"),
        ("cpu-tiny", flag("--block-size", 32), "32: must be 16"),
        ("ep8", flag("--gpu-memory-utilization", 0.98), "at most 0.97"),
        ("ep8", without("flags", "--max-num-seqs"), "--max-num-seqs is missing"),
        ("ep8", variable("VLLM_CPU_KVCACHE_SPACE"), "no effect on GPUs"),
        ("ep8", key("gpu", None), "gpu: must name the GPUs"),
        ("ep8", key("scale_rule", None), "scale_rule: must be mse or amax"),
        ("ep8", key("evidence", []), "evidence: must not be empty"),
        ("ep8", key("tensor_parallel_size", 4), "on 8 GPUs"),
        ("ep8", key("nodes", 2), "on 16 GPUs"),
        ("ep8-long", key("decode_context_parallel_size", 3), "must divide tensor_parallel_size 8"),
        (
            "pp2-tp8",
            both(key("nodes", 4), lambda d: d["gpu"].update(per_node=4)),
            "use a multiple of the nodes",
        ),
        ("dp-ep16", key("data_parallel_size_local", 8), "are 4 on each"),
        ("ep8", variable("HSA_ENABLE_IPC_MODE_LEGACY"), "left open and set"),
        ("mi355x-native", both(key("weights", "int4"), key("scale_rule", "mse")), "gfx942 only"),
        ("cpu-tiny", variable("VLLM_ROCM_USE_AITER"), "no effect on a CPU"),
        ("cpu-tiny", flag("--gpu-memory-utilization", 0.9), "no effect on a CPU"),
        ("cpu-tiny", key("gpu", load_profile("ep8").model_dump(mode="json")["gpu"]), "gpu: must be null"),
    ],
)
def test_what_does_not_go_together(name: str, change: Change, part: str) -> None:
    """Each of these starts without a complaint of vLLM's, or fails only after the weights are loaded."""
    assert part in refusal(name, change)


@pytest.mark.parametrize("value", [True, float("nan"), ""])
def test_a_flag_is_given_a_value_that_vllm_can_read(value: object) -> None:
    """``true`` would be written as ``True``, which is no value of any flag; a switch has no value."""
    assert "--max-num-seqs" in refusal("ep8", flag("--max-num-seqs", value))


def gfx942() -> list[Profile]:
    """All profiles for gfx942."""
    profiles = map(load_profile, profile_names())
    return [each for each in profiles if each.gpu and each.gpu.architecture is Architecture.GFX942]


@pytest.mark.parametrize("profile", gfx942(), ids=lambda profile: profile.name)
def test_what_gfx942_is_known_to_need(profile: Profile) -> None:
    """Triton's MLA and sampler, bf16 activations: cases 26 and 54, and vLLM's int4 pull request."""
    assert profile.environment["VLLM_ROCM_USE_AITER_MLA"].value == "0"
    assert profile.environment["VLLM_ROCM_USE_AITER_RMSNORM"].value == "0"
    assert profile.flags["--logprobs-mode"].value == "processed_logprobs"
    if profile.weights is Weights.INT4:
        assert profile.environment["VLLM_ROCM_USE_AITER_MOE_SITUV2"].value == "a16w4"


@pytest.mark.parametrize("name", profile_names())
def test_whole_experts_are_read_by_their_ranks_only(name: str) -> None:
    """Off by default, and each of eight ranks would read 1.42 TiB."""
    profile = load_profile(name)
    assert ("--enable-ep-weight-filter" in profile.flags) is profile.expert_parallel
