# SPDX-License-Identifier: Apache-2.0
"""The inherited environment: what contradicts a start, has no effect, or is replaced."""

from __future__ import annotations

import pytest

from kimi_k3.preflight.finding import Finding, State
from kimi_k3.preflight.variables import check_environment
from kimi_k3.profiles import rules

from .node import subject


def found(inherited: dict[str, str], profile: str = "ep8") -> list[Finding]:
    return list(check_environment(subject(profile), inherited))


def test_a_clean_environment() -> None:
    """One pass, so that the check is seen to have run."""
    (finding,) = found(
        {"PATH": "/bin", "HF_TOKEN": "x", "NCCL_SOCKET_IFNAME": "eth0", "HIP_VISIBLE_DEVICES": "0"}
    )
    assert finding.state is State.PASS


@pytest.mark.parametrize("name", rules.SITUV2_PAIR)
def test_half_of_a_pair(name: str) -> None:
    """One half without the other is garbage without a word (vllm-project/recipes#859)."""
    findings = found({name: "1"})
    assert findings[0].state is State.FAIL
    assert "contradict each other" in findings[0].what
    assert [finding.state for finding in findings[1:]] == [State.WARN]


def test_both_halves() -> None:
    """Not garbage, and still not what decides."""
    assert {finding.state for finding in found(dict.fromkeys(rules.SITUV2_PAIR, "1"))} == {State.WARN}


def test_a_service_called_vllm() -> None:
    """Kubernetes injects its address under the name of vLLM's port."""
    (finding,) = found({"VLLM_PORT": "tcp://10.0.0.7:8000"}, "cpu-tiny")
    assert finding.state is State.FAIL
    assert "enableServiceLinks: false" in (finding.remedy or "")
    (number,) = found({"VLLM_PORT": "29500"}, "cpu-tiny")
    assert number.state is State.WARN


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("VLLM_ROCM_USE_AITER_MOE", "0", "otherwise int4 is ignored"),
        ("VLLM_ROCM_USE_AITER_FP8BMM", "1", "crashes on gfx942"),
        ("VLLM_ROCM_USE_AITER_FP4BMM", "1", "need gfx950"),
    ],
)
def test_what_no_profile_may_say(name: str, value: str, part: str) -> None:
    """The rules of profiles hold for what vLLM inherits, too."""
    (finding,) = found({name: value})
    assert finding.state is State.FAIL
    assert part in finding.what


def test_what_the_profile_sets_itself() -> None:
    """The start replaces it, and says so: an operator who set it believes in it."""
    (finding,) = found({"VLLM_ROCM_USE_AITER_MLA": "1"})
    assert finding.state is State.WARN
    assert finding.what == "environment variable VLLM_ROCM_USE_AITER_MLA='1' is replaced by '0'"


def test_a_variable_that_vllm_does_not_know() -> None:
    """A name from a recipe, read by nobody."""
    (finding,) = found({"VLLM_ENGINE_CORE_INIT_TIMEOUT": "7200"})
    assert finding.state is State.WARN
    assert "VLLM_ENGINE_READY_TIMEOUT_S is what it reads" in finding.what


def test_secrets_are_not_told() -> None:
    """Findings are logged and sent to others."""
    inherited = {"HF_TOKEN": "hf_secret", "VLLM_API_KEY": "sk_secret", "KIMI_K3_API_KEY": "sk_secret"}
    assert not any("secret" in str(finding) for finding in found(inherited))
