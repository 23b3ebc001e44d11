# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that the plugin builds on, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kimi_k3.contract.source import Fact


class Use(Enum):
    """A circumstance in which vLLM is built on."""

    CPU = "cpu"
    GFX942 = "gfx942"
    INT4 = "int4"


@dataclass(frozen=True, kw_only=True)
class Reliance(Fact):
    """A fact that is built on under all of some circumstances.

    Attributes:
        only: the circumstances; none means always.
    """

    only: frozenset[Use] = frozenset()


def relied_on(uses: frozenset[Use]) -> tuple[Reliance, ...]:
    """What is built on where all of ``uses`` are given."""
    return tuple(each for each in RELIANCES if each.only <= uses)


_CPU = frozenset({Use.CPU})
_GFX942 = frozenset({Use.GFX942})
_INT4 = frozenset({Use.INT4})
_INT4_GFX942 = frozenset({Use.INT4, Use.GFX942})

_MOE = "model_executor/layers/quantization/mxfp4.py"
_ORACLE = "model_executor/layers/fused_moe/oracle/mxfp4.py"
_AITER_EXPERTS = "model_executor/layers/fused_moe/experts/rocm_aiter_moe.py"
_AITER_OPS = "_aiter_ops.py"
_LOADER = "model_executor/model_loader/default_loader.py"

RELIANCES = (
    # The experts' quantisation method
    Reliance(
        file=_MOE,
        name="Mxfp4MoEMethod.__init__",
        parameters=("moe",),
        why="the plugin's method extends it",
    ),
    Reliance(
        file=_MOE,
        name="Mxfp4MoEMethod.process_weights_after_loading",
        parameters=("layer",),
        why="the experts are converted in its place",
    ),
    Reliance(
        file=_MOE,
        name="Mxfp4MoEMethod.create_weights",
        parameters=("layer", "num_experts", "hidden_size", "intermediate_size_per_partition"),
        why="the conversion reads the weights and scales as they are laid out there",
    ),
    Reliance(
        file=_MOE,
        name="Mxfp4MoEMethod.maybe_roundup_sizes",
        parameters=("hidden_size", "intermediate_size_per_partition"),
        why="the plugin checks that nothing is rounded up there",
    ),
    Reliance(
        file=_MOE,
        name="Mxfp4MoEMethod._build_moe_kernel",
        parameters=("layer",),
        why="called after the conversion",
    ),
    Reliance(
        file=_MOE,
        name="Mxfp4MoEMethod.get_fused_moe_quant_config",
        parameters=("layer",),
        why="the kernels learn of the scales there",
    ),
    Reliance(
        file=_MOE,
        name="Mxfp4MoEMethod.supports_eplb",
        why="the plugin answers it for int4, whose scales cannot be moved expert by expert",
    ),
    Reliance(
        file=_MOE,
        name="Mxfp4Config._make_moe_method",
        parameters=("moe",),
        why="the plugin puts its method there",
    ),
    Reliance(
        file="model_executor/layers/quantization/__init__.py",
        name="register_quantization_config",
        parameters=("quantization",),
        why="the hook by which the plugin's configuration is found",
    ),
    Reliance(
        file="model_executor/utils.py",
        name="replace_parameter",
        parameters=("layer", "param_name"),
        why="the plugin puts the new weights and scales into the layer with it",
    ),
    Reliance(
        file="models/kimi_k3/amd/model.py",
        name="KimiK3ForConditionalGeneration",
        why="the model class that is served",
    ),
    # Loading
    Reliance(
        file="model_executor/model_loader/__init__.py",
        name="register_model_loader",
        parameters=("load_format",),
        why="the hook by which the plugin's loader is found",
    ),
    Reliance(
        file="model_executor/model_loader/base_loader.py",
        name="BaseModelLoader.load_model",
        parameters=("vllm_config", "model_config", "prefix"),
        why="the plugin's loader reports around it",
    ),
    Reliance(
        file=_LOADER,
        name="DefaultModelLoader.get_all_weights",
        parameters=("model_config", "model"),
        why="the plugin counts what it reads there",
    ),
    Reliance(
        file=_LOADER,
        name="DefaultModelLoader.load_weights",
        parameters=("model", "model_config"),
        why="the plugin reports the end of loading after it",
    ),
    Reliance(
        file=_LOADER,
        name="DefaultModelLoader._prepare_weights",
        why="the plugin asks it which files are read",
    ),
    Reliance(
        file="model_executor/model_loader/utils.py",
        name="process_weights_after_loading",
        parameters=("model",),
        why="it hands each layer to the plugin's method, one after the other",
    ),
    Reliance(
        file="model_executor/model_loader/ep_weight_filter.py",
        name="should_skip_weight",
        parameters=("weight_name", "local_expert_ids"),
        why="the plugin counts only what a rank reads",
    ),
    # A node of several
    Reliance(
        file="entrypoints/cli/serve.py",
        name="ServeSubcommand.cmd",
        parameters=("args",),
        why="what a node without an API runs",
    ),
    Reliance(
        file="entrypoints/cli/serve.py",
        name="ServeSubcommand.validate",
        parameters=("args",),
        why="checks its flags before",
    ),
    Reliance(
        file="entrypoints/cli/serve.py",
        name="ServeSubcommand.subparser_init",
        parameters=("subparsers",),
        why="reads its flags",
    ),
    # The request for int4
    Reliance(
        file="config/quantization.py",
        name="QUANT_KEY_NAMES",
        key="int4_per_group_32",
        only=_INT4,
        why="the name by which int4 is asked for",
    ),
    # The stand-ins for a CPU
    Reliance(
        file=_MOE,
        name="select_deepseek_v4_mxfp4_moe_backend",
        only=_CPU,
        why="replaced, to choose experts for the CPU",
    ),
    Reliance(
        file="model_executor/layers/fused_moe/config.py",
        name="int4_w4a16_moe_quant_config",
        parameters=("w1_scale", "w2_scale", "block_shape"),
        only=_CPU | _INT4,
        why="how the CPU's experts learn of the scales",
    ),
    Reliance(
        file="v1/worker/cpu_model_runner.py",
        name="CPUModelRunner._zero_block_ids",
        parameters=("block_ids",),
        only=_CPU,
        why="replaced, since it wipes blocks of other requests",
    ),
    Reliance(
        file="v1/worker/cpu_model_runner.py",
        name="CPUModelRunner.load_model",
        only=_CPU,
        why="followed by making the tensors between pipeline stages, which nothing else makes",
    ),
    Reliance(
        file="distributed/device_communicators/cpu_communicator.py",
        name="CpuCommunicator.dispatch",
        parameters=("hidden_states", "topk_weights", "topk_ids"),
        only=_CPU,
        why="gathers the tokens of data-parallel ranks by a method that the plugin adds",
    ),
    Reliance(
        file="v1/attention/backends/mla/cpu_mla.py",
        name="CPUMLABackend",
        only=_CPU,
        why="its block sizes are mended",
    ),
    # int4 on gfx942: the way that vLLM itself takes, which the plugin follows but for the conversion
    Reliance(
        file=_MOE,
        name="_use_k3_situ_int4_gfx942",
        parameters=("moe",),
        only=_INT4_GFX942,
        why="vLLM's gate for int4 on gfx942; the plugin says which of its conditions fails",
    ),
    Reliance(
        file=_MOE,
        name="_moe_weight_override_is_int4",
        only=_INT4_GFX942,
        why="one of the gate's conditions",
    ),
    Reliance(
        file=_MOE,
        name="Mxfp4MoEMethod",
        attribute="is_k3_situ_int4_gfx942",
        only=_INT4_GFX942,
        why="vLLM's gate for int4 on gfx942: without it the request is ignored and MXFP4 emulated",
    ),
    Reliance(
        file=_MOE,
        name="Mxfp4MoEMethod._setup_kernel_k3_situ_gfx942",
        parameters=("layer",),
        only=_INT4_GFX942,
        why="vLLM's own conversion, whose layout and attributes the plugin's has",
    ),
    Reliance(
        file=_ORACLE,
        name="mxfp4_round_up_hidden_size_and_intermediate_size",
        parameters=("backend", "hidden_size", "intermediate_size"),
        only=_INT4_GFX942,
        why="a round-up of the intermediate size would cost 56 GiB per GPU",
    ),
    Reliance(
        file=_ORACLE,
        name="make_mxfp4_moe_quant_config",
        parameters=("mxfp4_backend", "w1_scale", "w2_scale"),
        only=_INT4_GFX942,
        why="AITER's kernels learn of the scales there",
    ),
    Reliance(
        file=_ORACLE,
        name="make_mxfp4_moe_kernel",
        parameters=("moe_quant_config", "moe_config", "experts_cls", "mxfp4_backend"),
        only=_INT4_GFX942,
        why="the kernel is built there",
    ),
    Reliance(
        file=_ORACLE,
        name="_validate_mxfp4_experts_config",
        parameters=("experts_cls", "moe_config", "mxfp4_backend"),
        only=_INT4_GFX942,
        why="it asks the experts' class what it supports, and 0.32.0 asks for MXFP4 only",
    ),
    Reliance(
        file=_ORACLE,
        name="backend_to_kernel_cls",
        parameters=("backend",),
        only=_INT4_GFX942,
        why="the plugin's experts' class extends the one that it names",
    ),
    Reliance(
        file=_AITER_EXPERTS,
        name="rocm_aiter_fused_experts",
        parameters=("hidden_states", "w1", "w2", "topk_weights", "topk_ids", "moe_config", "quant_config"),
        only=_INT4_GFX942,
        why="how AITER is called, when serving and by the canary",
    ),
    Reliance(
        file=_AITER_EXPERTS,
        name="AiterExperts.apply",
        parameters=("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "expert_map"),
        only=_INT4_GFX942,
        why="the canary calls it as serving does",
    ),
    Reliance(
        file=_AITER_OPS,
        name="rocm_aiter_ops.is_fused_moe_enabled",
        only=_INT4_GFX942,
        why="one of the gate's conditions",
    ),
    Reliance(
        file=_AITER_OPS,
        name="rocm_aiter_ops.fused_moe",
        parameters=("hidden_states", "w1", "w2", "beta", "linear_beta", "gate_mode"),
        only=_INT4_GFX942,
        why="the call into AITER",
    ),
    Reliance(
        file=_AITER_OPS,
        name="_rocm_aiter_fused_moe_impl",
        parameters=("hidden_states", "w1", "w2", "expert_mask", "beta", "linear_beta"),
        only=_INT4_GFX942,
        why="what is handed to AITER, and as what",
    ),
    *(
        Reliance(
            file=_AITER_OPS, name=name, only=_INT4_GFX942, why="it decides what AITER is asked to compute"
        )
        for name in (
            "rocm_aiter_ops.get_aiter_activation_type",
            "rocm_aiter_ops.is_fused_moe_situv2_enabled",
            "rocm_aiter_ops.is_fused_moe_situv2_gate_up_interleaved",
            "_sync_aiter_situv2_moe_env",
        )
    ),
    Reliance(
        file="model_executor/layers/fused_moe/modular_kernel.py",
        name="FusedMoEExperts.is_supported_config",
        parameters=("moe_config", "weight_key", "activation_key"),
        only=_INT4_GFX942,
        why="the plugin asks it before anything is loaded",
    ),
    Reliance(
        file="model_executor/layers/fused_moe/expert_map_manager.py",
        name="determine_expert_map",
        only=_INT4_GFX942,
        why="the canary's mask of a rank's experts is made like its",
    ),
    Reliance(
        file="model_executor/utils.py",
        name="is_weights_pre_processed",
        only=_INT4,
        why="weights that were processed before are not converted again",
    ),
    Reliance(
        file=_AITER_OPS,
        name="_resolve_situv2_activation",
        only=_INT4_GFX942,
        why="it decides whether activations stay bf16 and how gate and up stand",
    ),
    # What the plugin guards or follows on gfx942
    Reliance(
        file="v1/sample/ops/topk_topp_sampler.py",
        name="TopKTopPSampler.__init__",
        parameters=("logprobs_mode",),
        only=_GFX942,
        why="it chooses AITER's sampler, which crashes on gfx942, unless log-probabilities are processed",
    ),
    Reliance(
        file="v1/worker/gpu_worker.py",
        name="Worker.reload_weights",
        only=_INT4_GFX942,
        why="refused: converted weights cannot be loaded over",
    ),
    Reliance(
        file="v1/worker/gpu_worker.py",
        name="Worker.compile_or_warm_up_model",
        only=_GFX942,
        why="profiling ends and warm-up begins there",
    ),
    Reliance(
        file="v1/worker/gpu_model_runner.py",
        name="GPUModelRunner._capture_cudagraphs",
        only=_GFX942,
        why="its progress bar says how many graphs are captured",
    ),
    Reliance(
        file="v1/worker/gpu/cudagraph_utils.py",
        name="CudaGraphManager.capture",
        only=_GFX942,
        why="the progress bar of the other model runner",
    ),
)
"""Definitions that are functions or variables are compared with those of the recorded versions, line by line;
classes only by their names, since what matters of them is listed."""
