# SPDX-License-Identifier: Apache-2.0
"""The argv and environment of vLLM, from a deployment."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from kimi_k3.plan.launch import (
    KEY_GUARD,
    Deployment,
    Launch,
    build_launch,
    child_environment,
    common_options,
    overridden,
    socket_dir,
)
from kimi_k3.plan.nodes import Place
from kimi_k3.plan.overrides import changed
from kimi_k3.profiles.load import load_profile, profile_names
from kimi_k3.profiles.schema import Profile
from kimi_k3.words.tls import Certificate
from kimi_k3.words.weights import ConsentSource, Requantisation, ScaleRule, Weights

COMMAND = ("python", "-m", "engine")

DEPLOYMENT = Deployment(
    profile=load_profile("cpu-tiny"),
    checkpoint=Path("/models/k3"),
    state_dir=Path("/state"),
    socket_dir=Path("/tmp/kimi-k3-start"),
    start_id="s1",
    weights=Weights.MXFP4,
    requantisation=None,
    consent=None,
    host="127.0.0.1",
    port=8000,
    served_model_name="kimi-k3",
    tensor_parallel_size=1,
    expert_parallel=False,
    start_timeout=600,
    drain_timeout=30,
    readiness_delay=0,
    hang_timeout=360,
    guarded=False,
)
INT4 = replace(
    DEPLOYMENT,
    weights=Weights.INT4,
    requantisation=Requantisation(rule=ScaleRule.MSE, negative_scale=True, allow_nonfinite=False),
    consent=ConsentSource.FLAG,
)


def launched(profile: Profile) -> Deployment:
    """A start of ``profile`` as an operator leaves it, with consent and a key."""
    return replace(
        INT4 if profile.weights.lossy else DEPLOYMENT,
        profile=profile,
        tensor_parallel_size=profile.tensor_parallel_size,
        expert_parallel=profile.expert_parallel,
        guarded=True,
    )


def with_flags(deployment: Deployment, **flags: int | str) -> Deployment:
    changes = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    return replace(deployment, profile=changed(deployment.profile, changes, given="a test"))


def launch(deployment: Deployment) -> Launch:
    return build_launch(deployment, cores={0, 1, 2, 3}, engine_command=COMMAND)


def value(deployment: Deployment, flag: str) -> str:
    argv = launch(deployment).argv
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


def test_the_engine_command_comes_first() -> None:
    """What runs vLLM is the caller's choice; everything after it is vLLM's."""
    assert launch(DEPLOYMENT).argv[:5] == (*COMMAND, "--model", "/models/k3")


@pytest.mark.parametrize("deployment", [DEPLOYMENT, INT4])
def test_our_loader_always_loads(deployment: Deployment) -> None:
    """Without the plugin vLLM does not know the loader's name and refuses, instead of serving unseen."""
    assert value(deployment, "--load-format") == "kimi_k3"


def test_int4_asks_vllm_for_int4_and_mxfp4_does_not() -> None:
    """vLLM's own opt-in gate is the only switch of the conversion."""
    assert value(INT4, "--quantization-config.moe.weight") == "int4_per_group_32"
    assert not any("quantization" in word for word in launch(DEPLOYMENT).argv)


def test_expert_parallel_is_a_switch() -> None:
    """Absent unless asked for."""
    assert "--enable-expert-parallel" not in launch(DEPLOYMENT).argv
    assert "--enable-expert-parallel" in launch(replace(DEPLOYMENT, expert_parallel=True)).argv


@pytest.mark.parametrize(
    ("name", "flag", "size"),
    [
        ("pp2-tp8", "--pipeline-parallel-size", "2"),
        ("dp-ep16", "--data-parallel-size", "8"),
        ("ep8-long", "--decode-context-parallel-size", "8"),
    ],
)
def test_sizes_beyond_one_are_written(name: str, flag: str, size: str) -> None:
    """A profile's number of ranks that did not reach vLLM would be another deployment."""
    assert value(launched(load_profile(name)), flag) == size
    assert flag not in launch(launched(load_profile("ep8"))).argv


@pytest.mark.parametrize("name", [name for name in profile_names() if name != "cpu-tiny"])
def test_gpus_get_nothing_that_is_for_a_cpu(name: str) -> None:
    """Cores are bound by vLLM on a CPU only, and a GPU's launch is the profile's and the plan's flags."""
    plan = launch(launched(load_profile(name)))
    assert not [variable for variable in plan.environment if variable.startswith("VLLM_CPU_")]
    assert all(flag in plan.argv for flag in load_profile(name).flags)
    assert ("--load-format" in plan.argv) is (name != "mi355x-native")


def test_an_operators_value_replaces_the_profiles() -> None:
    """A flag stands in argv once, with the operator's value."""
    changed = with_flags(DEPLOYMENT, max_model_len=512, max_num_seqs=2, dtype="bfloat16")
    assert value(changed, "--max-model-len") == "512"
    assert value(changed, "--max-num-seqs") == "2"
    assert value(changed, "--dtype") == "bfloat16"


@pytest.mark.parametrize(("longest", "batched"), [(512, "1024"), (1024, "1024"), (4096, "4096")])
def test_a_step_holds_the_longest_prompt(longest: int, batched: str) -> None:
    """Without chunked prefill vLLM refuses a batch smaller than the longest prompt."""
    assert value(with_flags(DEPLOYMENT, max_model_len=longest), "--max-num-batched-tokens") == batched


def test_the_engine_is_told_what_was_decided() -> None:
    """The plugin in each process reads exactly these."""
    told = launch(INT4).environment
    assert told["KIMI_K3_STATE_DIR"] == "/state"
    assert told["KIMI_K3_START_ID"] == "s1"
    assert told["KIMI_K3_WEIGHTS"] == "int4"
    assert told["KIMI_K3_SCALE_RULE"] == "mse"
    assert told["KIMI_K3_ACCEPT_LOSSY"] == "1"
    assert launch(DEPLOYMENT).environment["KIMI_K3_ACCEPT_LOSSY"] == "0"


@pytest.mark.parametrize("timeout", [0.5, 600, 7200])
def test_vllm_is_more_patient_than_we_are(timeout: float) -> None:
    """vLLM's ready timeout of 600 s ends a start that still loads (vllm-project/vllm#48031)."""
    environment = launch(replace(DEPLOYMENT, start_timeout=timeout)).environment
    assert int(environment["VLLM_ENGINE_READY_TIMEOUT_S"]) >= timeout


def test_each_rank_has_its_cores() -> None:
    """vLLM's automatic binding refuses more ranks than NUMA nodes."""
    profile = changed(DEPLOYMENT.profile, {"tensor_parallel_size": 2}, given="2")
    two = launch(replace(DEPLOYMENT, profile=profile, tensor_parallel_size=2)).environment
    assert two["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"


def test_of_several_nodes_only_the_first_has_an_api() -> None:
    """Each is told which it is and where the first is; what only an API server knows is left out."""
    profile = changed(INT4.profile, {"nodes": 2, "pipeline_parallel_size": 2}, given="2")
    first, other = (
        launch(replace(INT4, profile=profile, place=Place(node=node, nodes=2, leader="k3-0"), guarded=True))
        for node in (0, 1)
    )
    for node, found in enumerate((first, other)):
        text = " ".join(found.argv)
        assert f"--nnodes 2 --node-rank {node} --master-addr k3-0 --master-port 29501" in text
        assert "--pipeline-parallel-size 2" in text
        assert "--quantization-config.moe.weight" in text
        # One rank on each node, which has all of its cores.
        assert found.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1,2,3"
    of_servers = {"--host", "--port", "--middleware", "--enable-server-load-tracking"}
    assert of_servers <= set(first.argv)
    assert not of_servers & set(other.argv)
    assert "--headless" in other.argv
    assert "--headless" not in first.argv


@pytest.mark.parametrize("name", [name for name in profile_names() if load_profile(name).nodes > 1])
def test_what_nodes_have_in_common(name: str) -> None:
    """Nodes of one deployment agree in it, wherever things are there; any option of the profile is in it."""
    deployment = launched(load_profile(name))
    first = replace(deployment, place=Place(node=0, nodes=2, leader="k3-0"))
    elsewhere = Path("/elsewhere")
    other = replace(
        deployment,
        place=Place(node=1, nodes=2, leader="10.0.0.1"),
        checkpoint=elsewhere / "k3",
        state_dir=elsewhere / "state",
        socket_dir=elsewhere / "sockets",
        start_id="another",
        port=8123,
        guarded=False,
        tls=Certificate(elsewhere / "crt", elsewhere / "key"),
        drain_timeout=7.0,
    )
    here = common_options(launch(first), first)
    assert here == common_options(launch(other), other)
    assert {*first.profile.flags, *first.profile.environment, "--master-port"} <= here.keys()
    for changed_one in (
        with_flags(first, max_num_seqs=7),
        replace(first, place=Place(node=0, nodes=2, leader="k3-0", port=4)),
        replace(first, expert_parallel=not first.expert_parallel),
        replace(first, served_model_name="other"),
    ):
        assert common_options(launch(changed_one), changed_one) != here


def test_the_key_goes_only_into_the_childs_environment() -> None:
    """A launch can be printed; our own variable with the key does not go on to the engine."""
    inherited = {"PATH": "/bin", "KIMI_K3_API_KEY": "secret", "KIMI_K3_SIDECAR_TOKEN": "secret"}
    environment = child_environment(launch(DEPLOYMENT), inherited, api_key="secret")
    assert environment["VLLM_API_KEY"] == "secret"
    assert "KIMI_K3_API_KEY" not in environment
    assert "KIMI_K3_SIDECAR_TOKEN" not in environment
    assert environment["PATH"] == "/bin"
    assert "secret" not in repr(launch(DEPLOYMENT))


def test_a_key_guards_every_path() -> None:
    """vLLM asks for its key below some prefixes only; without a key there is nothing to ask for."""
    assert value(replace(DEPLOYMENT, guarded=True), "--middleware") == "kimi_k3.engine.key_guard.KeyGuard"
    assert "--middleware" not in launch(DEPLOYMENT).argv


def test_the_guard_exists() -> None:
    """vLLM imports it by this name, and only once it serves; importing it needs the engine's packages."""
    module, _, name = KEY_GUARD.rpartition(".")
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert f"class {name}" in Path(spec.origin).read_text(encoding="utf-8")


def test_no_key_no_variable() -> None:
    """An empty key would be a key."""
    assert "VLLM_API_KEY" not in child_environment(launch(DEPLOYMENT), {}, api_key=None)


def test_a_replaced_variable_is_told() -> None:
    """An operator who set it would otherwise wonder why it has no effect."""
    plan = launch(DEPLOYMENT)
    assert overridden(plan, {"VLLM_CPU_KVCACHE_SPACE": "40"}) == (
        "environment variable VLLM_CPU_KVCACHE_SPACE='40' is replaced by '1'",
    )
    assert overridden(plan, {"VLLM_CPU_KVCACHE_SPACE": "1", "HOME": "/root"}) == ()


def test_a_replaced_variable_without_a_reason_of_a_profile() -> None:
    """The plan's own are told, too, but neither what an operator says to us nor how Python prints."""
    plan = launch(DEPLOYMENT)
    (line,) = overridden(
        plan, {"VLLM_CPU_OMP_THREADS_BIND": "9", "KIMI_K3_STATE_DIR": "/other", "PYTHONUNBUFFERED": "yes"}
    )
    assert line.startswith("environment variable VLLM_CPU_OMP_THREADS_BIND='9' is replaced by ")


PARSE = """
import json
import sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for argv in json.loads(sys.argv[1]):
    arguments = parser.parse_args(argv)
    validate_parsed_serve_args(arguments)
    experts = arguments.quantization_config and arguments.quantization_config.moe
    print("PARSED", arguments.load_format, arguments.max_model_len, experts)
"""


@pytest.mark.engine
def test_vllm_understands_every_flag() -> None:
    """The real parser of the installed vLLM, because a flag that was renamed fails only there."""
    pytest.importorskip("vllm.version", reason="vLLM is not installed")
    tiny = replace(
        with_flags(INT4, dtype="float32"), tensor_parallel_size=2, expert_parallel=True, guarded=True
    )
    deployments = [tiny, *map(launched, map(load_profile, profile_names()))]
    argvs = [build_launch(each, cores={0, 1}, engine_command=()).argv for each in deployments]
    command = [sys.executable, "-c", PARSE, json.dumps(argvs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("PARSED")] == [
        f"PARSED {'kimi_k3' if each.profile.uses_plugin else 'auto'} "
        f"{each.profile.flags['--max-model-len'].value} "
        f"{'int4_per_group_32' if each.weights.lossy else 'None'}"
        for each in deployments
    ]


@pytest.mark.parametrize(("temporary", "used"), [("/var/tmp", "/var/tmp"), ("/" + "x" * 60, "/tmp")])
def test_sockets_get_a_directory_that_a_socket_can_have(temporary: str, used: str) -> None:
    """A socket's path holds 107 characters, and vLLM's error about it names neither TMPDIR nor a remedy."""
    directory = socket_dir("20261130T205548Z-422fcf", Path(temporary))
    assert directory == Path(used) / "kimi-k3-20261130T205548Z-422fcf"
    assert len(f"{directory}/{uuid.uuid4()}") <= 107
