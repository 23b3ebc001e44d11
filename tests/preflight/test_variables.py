# SPDX-License-Identifier: Apache-2.0
"""The inherited environment: what contradicts a start, has no effect, or is replaced."""

from __future__ import annotations

import pytest

from kimi_k3.preflight.finding import Finding, State
from kimi_k3.preflight.machine import Machine
from kimi_k3.preflight.variables import check_environment
from kimi_k3.preflight.vllm_source import variables_of
from kimi_k3.profiles import rules

from .node import Node, subject


def found(inherited: dict[str, str], profile: str = "ep8") -> list[Finding]:
    return list(check_environment(Machine(environment=inherited), subject(profile)))


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


def test_layers_cut_otherwise() -> None:
    """Acceptance counts conversions by stage, and would refuse the start after everything was loaded."""
    findings = found({rules.LAYER_PARTITION: "40,53"}, "pp2-tp8")
    assert findings[0].state is State.FAIL
    assert rules.LAYER_PARTITION in findings[0].what
    assert State.FAIL not in {finding.state for finding in found({rules.LAYER_PARTITION: "93"})}


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("VLLM_ROCM_USE_AITER_MOE", "0", "otherwise int4 is ignored"),
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


@pytest.fixture
def node(node: Node) -> Node:
    """The node with a vLLM that knows a few variables."""
    node.write("/site/vllm/__init__.py", "raise RuntimeError('nobody may import this')\n")
    node.write(
        "/site/vllm/envs.py",
        "import os\n\nenvironment_variables: dict = {\n"
        '    "VLLM_ROCM_USE_AITER_MLA": lambda: os.getenv("X"),\n    "VLLM_CACHE_ROOT": lambda: 1,\n'
        '    "CUDA_HOME": lambda: 1,\n}\n',
    )
    return node


def lines(node: Node, environment: dict[str, str]) -> list[str]:
    node.environment = environment
    findings = check_environment(node.machine, subject("cpu-tiny"))
    return [str(finding).replace(": environment variable", "") for finding in findings]


def test_a_misspelt_variable(node: Node) -> None:
    """vLLM passes over it with a line among thousands; its value may be anything, and is not told."""
    assert lines(node, {"VLLM_ROCM_USE_AITER_MLAA": "1", "VLLM_SECRET": "hidden"}) == [
        "warn environment-without-effect VLLM_ROCM_USE_AITER_MLAA: the installed vLLM does not know it; "
        "did you mean VLLM_ROCM_USE_AITER_MLA?",
        "warn environment-without-effect VLLM_SECRET: the installed vLLM does not know it; unset it",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_CACHE_ROOT", "/x"),
        ("VLLM_EMPTY", ""),
        ("VLLMX", "1"),
        ("AITER_ANYTHING", "1"),
        ("VLLM_SERVICE_HOST", "10.0.0.1"),
        ("VLLM_ROUTER_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("VLLM_ROUTER_PORT", "tcp://10.0.0.1:8000"),
    ],
)
def test_a_variable_that_is_no_mistake(node: Node, name: str, value: str) -> None:
    """One that vLLM knows, an empty one, those of others, and those that Kubernetes makes of Services."""
    (line,) = lines(node, {name: value})
    assert line.startswith("pass ")


@pytest.mark.parametrize("source", ["", "environment_variables = make()\n", "def (\n"])
def test_a_vllm_that_does_not_tell(node: Node, source: str) -> None:
    """Nothing is said of variables where nothing is known."""
    node.write("/site/vllm/envs.py", source)
    assert lines(node, {"VLLM_MISSPELT": "1"})[0].startswith("pass ")
    node.remove("/site/vllm")
    assert lines(node, {"VLLM_MISSPELT": "1"})[0].startswith("pass ")


def test_the_variables_of_the_installed_vllm() -> None:
    """The table is found by its name: were it another one, no mistake would ever be told."""
    package = Machine().package("vllm")
    if package is None:
        pytest.skip("vLLM is not installed")
    assert {"VLLM_CACHE_ROOT", "VLLM_PLUGINS", "VLLM_ROCM_USE_AITER_MOE"} <= variables_of(package)


def test_what_the_start_sets_itself() -> None:
    """Also without a reason in the profile: whoever binds cores must know that they are bound anew."""
    (finding,) = found({"VLLM_CPU_OMP_THREADS_BIND": "0-3", "PYTHONUNBUFFERED": "yes"}, "cpu-tiny")
    assert finding.check == "environment-replaced"
    assert finding.what.startswith(
        "environment variable VLLM_CPU_OMP_THREADS_BIND='0-3' is replaced by '0,1,"
    )


def test_secrets_are_not_told() -> None:
    """Findings are logged and sent to others."""
    inherited = {"HF_TOKEN": "hf_secret", "VLLM_API_KEY": "sk_secret", "KIMI_K3_API_KEY": "sk_secret"}
    assert not any("secret" in str(finding) for finding in found(inherited))
