# SPDX-License-Identifier: Apache-2.0
"""What no profile may say, and why: as data, and as pure functions for what only a combination makes wrong.

vLLM accepts most of what stands here without a word and then ignores it, serves garbage, or dies after
an hour of loading. Names are those of vLLM 0.32.0 and 0.33.0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from kimi_k3.profiles.values import CPU_ATTENTION
from kimi_k3.words.weights import Weights

PLANNED_FLAGS = frozenset(
    {
        "--model",
        "--host",
        "--port",
        "--served-model-name",
        "--load-format",
        "--middleware",
        "--quantization",
        "--quantization-config",
        "--quantization-config.moe.weight",
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
        "--decode-context-parallel-size",
        "--enable-expert-parallel",
        "--data-parallel-size",
        "--data-parallel-size-local",
        "--data-parallel-address",
        "--data-parallel-rpc-port",
        "--data-parallel-rank",
        "--data-parallel-start-rank",
        "--data-parallel-backend",
        "--data-parallel-hybrid-lb",
        "--data-parallel-external-lb",
        "--data-parallel-multi-port-external-lb",
        "--api-server-count",
        "--nnodes",
        "--node-rank",
        "--master-addr",
        "--master-port",
        "--headless",
        "--ssl-certfile",
        "--ssl-keyfile",
        "--enable-ssl-refresh",
        "--spec-model",
        "--shutdown-timeout",
        "--enable-server-load-tracking",
        "--disable-access-log-for-endpoints",
    }
)
"""vLLM flags that only the plan writes: they belong to one start or follow from a profile's other keys."""

REFUSED_FLAGS = {
    "--api-key": "a key in argv is readable by every user of the machine",
    "--hf-token": "a token in argv is readable by every user of the machine",
    "--moe-backend": "vLLM's own choice is the only one that serves Kimi-K3; a forced one fails or is slow",
    "--max-parallel-loading-workers": "vLLM ignores it",
    "--mamba-cache-mode": "vLLM ignores it: the cache follows --enable-prefix-caching",
    "--disable-cascade-attn": "vLLM ignores it",
    "--log-config-file": "vLLM announces its removal, and the supervisor reads the log as vLLM writes it",
    "--device-memory-utilization": "it is another name of --gpu-memory-utilization, which is the one to set",
}
"""vLLM flags that no deployment of this product may use, and why."""

PLANNED_VARIABLES = frozenset(
    {
        "PYTHONUNBUFFERED",
        "VLLM_API_KEY",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_DP_MASTER_IP",
        "VLLM_DP_MASTER_PORT",
        "VLLM_DP_RANK",
        "VLLM_DP_RANK_LOCAL",
        "VLLM_DP_SIZE",
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "VLLM_HOST_IP",
        "VLLM_PLUGINS",
        "VLLM_PORT",
        "VLLM_RPC_BASE_PATH",
    }
)
"""Environment variables that only the plan or the supervisor writes, beside ``KIMI_K3_*``."""

_HALF_OF_A_PAIR = (
    "it is half of a pair, and one half without the other serves garbage without a word "
    "(vllm-project/recipes#859); set VLLM_ROCM_USE_AITER_MOE_SITUV2, from which vLLM makes both"
)
_REMOVED = "vLLM 0.33 no longer reads it"
_ONE_CLUSTER = "interfaces have other names on other machines; set it in the environment of the start"
_ONE_START = "which devices are used belongs to one start"
_SECRET = "a secret in a profile is readable by everyone who has the package"

LAYER_PARTITION = "VLLM_PP_LAYER_PARTITION"

REFUSED_VARIABLES = {
    "AITER_SITUV2_A8W4": _HALF_OF_A_PAIR,
    "AITER_SITUV2_A4W4": _HALF_OF_A_PAIR,
    "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4": _HALF_OF_A_PAIR,
    "AITER_BF16_FP8_MOE_BOUND": "vLLM sets it itself, whatever was there before",
    "VLLM_ENGINE_CORE_INIT_TIMEOUT": "vLLM does not know it; VLLM_ENGINE_READY_TIMEOUT_S is what it reads",
    "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS": _REMOVED,
    "VLLM_ROCM_AITER_MLA_DCP_VERIFY": _REMOVED,
    "VLLM_ROCM_MONO_DECODE": _REMOVED,
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM": _REMOVED,
    "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE": _REMOVED,
    "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM": _REMOVED,
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": _REMOVED,
    "VLLM_USE_RAY_WRAPPED_PP_COMM": _REMOVED,
    LAYER_PARTITION: "the plan cuts the layers as vLLM does by itself",
    "PYTORCH_CUDA_ALLOC_CONF": "PyTorch reads it under the name PYTORCH_ALLOC_CONF, which is the one to set",
    "PYTORCH_HIP_ALLOC_CONF": "PyTorch reads it under the name PYTORCH_ALLOC_CONF, which is the one to set",
    "NCCL_SOCKET_IFNAME": _ONE_CLUSTER,
    "GLOO_SOCKET_IFNAME": _ONE_CLUSTER,
    "NCCL_IB_HCA": _ONE_CLUSTER,
    "NCCL_IB_GID_INDEX": _ONE_CLUSTER,
    "CUDA_VISIBLE_DEVICES": _ONE_START,
    "HIP_VISIBLE_DEVICES": _ONE_START,
    "ROCR_VISIBLE_DEVICES": _ONE_START,
    "HF_TOKEN": _SECRET,
    "HUGGING_FACE_HUB_TOKEN": _SECRET,
}
"""Environment variables that no profile may set, and why."""

OF_ONE_START = frozenset(
    name for name, why in REFUSED_VARIABLES.items() if why in (_ONE_CLUSTER, _ONE_START, _SECRET)
)
"""Those of them that belong into the environment of a start."""

SITUV2_PAIR = ("AITER_SITUV2_A8W4", "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4")
"""Set alike or not at all: AITER reads the one, older vLLM the other (vllm-project/recipes#859)."""

FP8BMM = "VLLM_ROCM_USE_AITER_FP8BMM"

WITHOUT_OTHER_EXPERTS = "--enable-ep-weight-filter"
READ_AHEAD = "--safetensors-load-strategy"
STEP_TOKENS, REQUESTS, LONGEST = "--max-num-batched-tokens", "--max-num-seqs", "--max-model-len"
ATTENTION = "--attention-backend"
WHOLE_PROMPTS = "--no-enable-chunked-prefill"
BLOCK = "--block-size"
SITUV2 = "VLLM_ROCM_USE_AITER_MOE_SITUV2"
SPECULATIVE = "--speculative-config"

NEEDED_ON_GPUS = ("--gpu-memory-utilization", LONGEST, STEP_TOKENS, REQUESTS)
"""Without these vLLM takes defaults that were chosen for smaller models."""

BLOCK_MULTIPLE = 16
"""Tokens of a block in which Triton's MLA can read (``TritonMLABackend.supports_block_size``)."""

CPU_BLOCK = 16
"""Tokens for which the CPU's MLA kernel is compiled (vllm/platforms/cpu.py)."""

MOST_UTILISATION = 0.97
MOST_REQUESTS = 256
"""Requests at a time on a GPU: 512 ran out of memory on MI325X (vllm-project/vllm#50817), since every
running request also holds the float32 state of all KDA layers, 54 MiB a rank with eight ranks."""

Flags = Mapping[str, str | None]
Variables = Mapping[str, str]


def refused_flag(name: str) -> str | None:
    """Why no profile may have the flag ``name``, in any of its spellings; ``None`` if it may."""
    for spelling in _spellings(name):
        if spelling in REFUSED_FLAGS:
            return f"{name} is refused: {REFUSED_FLAGS[spelling]}"
        if spelling in PLANNED_FLAGS:
            return f"{name} is written by the plan, not by a profile"
    return None


def refused_variable(name: str) -> str | None:
    """Why no profile may set the variable ``name``; ``None`` if it may."""
    if name in REFUSED_VARIABLES:
        return f"{name} is refused: {REFUSED_VARIABLES[name]}"
    if name in PLANNED_VARIABLES or name.startswith("KIMI_K3_"):
        return f"{name} is written by the plan, not by a profile"
    return None


def _spellings(name: str) -> Iterator[str]:
    """The flag, and the one that it negates: vLLM 0.32 says ``--no-enable-x``, 0.33 also ``--disable-x``."""
    yield name
    for negation, plain in (("--no-", "--"), ("--disable-", "--enable-"), ("--enable-", "--disable-")):
        if name.startswith(negation):
            yield plain + name.removeprefix(negation)


def contradictions(flags: Flags, variables: Variables, *, expert_parallel: bool) -> Iterator[str]:
    """What cannot stand together on any device."""
    if WITHOUT_OTHER_EXPERTS in flags:
        if "--enable-eplb" in flags:
            yield (
                f"{WITHOUT_OTHER_EXPERTS} with --enable-eplb: balancing needs every rank to read all experts "
                "and vLLM drops the filter without a word; keep one of them"
            )
        if not expert_parallel:
            yield (
                f"{WITHOUT_OTHER_EXPERTS} has no effect without expert_parallel, where each rank has a slice "
                "of every expert; remove it"
            )
        if flags.get(READ_AHEAD) != "lazy":
            yield (
                f"{WITHOUT_OTHER_EXPERTS} needs {READ_AHEAD} lazy: prefetch and eager read every expert "
                "whatever the filter says, and vLLM prefetches by itself on NFS and Lustre"
            )
    if "--enable-eplb" in flags and not expert_parallel:
        yield "--enable-eplb needs expert_parallel; without it vLLM refuses to start"
    if "--language-model-only" in flags:
        for name in flags:
            if name.startswith(("--mm-", "--limit-mm-", "--enable-mm-")):
                yield f"{name} has no effect with --language-model-only; remove one of them"
    if ("--enable-auto-tool-choice" in flags) is not ("--tool-call-parser" in flags):
        yield "--enable-auto-tool-choice and --tool-call-parser need each other; give both or none"
    tokens, requests = step_tokens(flags), _number(flags.get(REQUESTS))
    if tokens is not None and requests is not None and tokens < requests:
        yield (
            f"{STEP_TOKENS} {tokens}: is less than {REQUESTS} {flags[REQUESTS]}, and vLLM refuses steps in "
            "which not every request gets a token; raise the one or lower the other"
        )
    if SITUV2 in variables and variables.get("VLLM_ROCM_USE_AITER") != "1":
        yield f"{SITUV2} has no effect without VLLM_ROCM_USE_AITER=1; remove it"


def step_tokens(flags: Flags) -> int | None:
    """Tokens of a step; ``None`` if vLLM decides.

    Without chunked prefill at least the longest prompt: vLLM refuses one that does not fit into one step.
    """
    tokens, longest = _number(flags.get(STEP_TOKENS)), _number(flags.get(LONGEST))
    if tokens is None:
        return None
    return int(max(tokens, longest or 0) if WHOLE_PROMPTS in flags else tokens)


def unfit_for_gpus(flags: Flags, variables: Variables) -> Iterator[str]:
    """What a profile for GPUs must not leave to vLLM's defaults, and its bounds."""
    for name in NEEDED_ON_GPUS:
        if name not in flags:
            yield f"{name} is missing: vLLM's default is for smaller models, so a profile for GPUs decides it"
    if (
        used := _number(flags.get("--gpu-memory-utilization"))
    ) is not None and not 0 < used <= MOST_UTILISATION:
        yield (
            f"--gpu-memory-utilization {flags['--gpu-memory-utilization']}: must be more than 0 and at most "
            f"{MOST_UTILISATION}, since RCCL and the driver allocate beside PyTorch"
        )
    if (requests := _number(flags.get(REQUESTS))) is not None and requests > MOST_REQUESTS:
        yield (
            f"{REQUESTS} {flags[REQUESTS]}: must be at most {MOST_REQUESTS}, since 512 ran out of memory on "
            "MI325X"
        )
    if (block := _number(flags.get(BLOCK))) is not None and block % BLOCK_MULTIPLE:
        yield (
            f"{BLOCK} {flags[BLOCK]}: must be a multiple of {BLOCK_MULTIPLE}, since Triton's MLA reads no "
            "other blocks, and vLLM then finds no attention that it could take"
        )
    if (dtype := flags.get("--dtype")) not in (None, "auto", "bfloat16"):
        yield f"--dtype {dtype}: must be bfloat16, which the experts' kernels and the attention take"
    if flags.get(ATTENTION) == CPU_ATTENTION:
        yield f"{ATTENTION} {CPU_ATTENTION}: reads a CPU's cache; remove it"
    for name in variables:
        if name.startswith("VLLM_CPU_"):
            yield f"{name} has no effect on GPUs; remove it"


def unfit_for_gfx942(flags: Flags, variables: Variables, weights: Weights) -> Iterator[str]:
    """What gfx942 cannot do, does wrongly, or needs."""
    aiter = variables.get("VLLM_ROCM_USE_AITER") == "1"
    if weights is Weights.INT4 and not aiter:
        yield (
            "weights int4 needs VLLM_ROCM_USE_AITER=1: without it vLLM ignores the request and emulates "
            "MXFP4, eight times slower"
        )
    if weights is Weights.INT4 and variables.get("VLLM_ROCM_USE_AITER_MOE", "1") != "1":
        yield "weights int4 needs VLLM_ROCM_USE_AITER_MOE=1, vLLM's default: otherwise int4 is ignored"
    activations = variables.get(SITUV2)
    if activations not in (None, "a16w4"):
        yield (
            f"{SITUV2}={activations}: gfx942 has only a16w4; a8w4 with int4 experts serves garbage without a "
            "word, since gate and up projections then stand in another order than the kernels expect"
        )
    if weights is Weights.INT4 and activations is None:
        yield f"weights int4 needs {SITUV2}=a16w4: vLLM's default tells AITER to quantise activations to FP4"
    if aiter and variables.get("VLLM_ROCM_USE_AITER_MLA") != "0":
        yield (
            "VLLM_ROCM_USE_AITER=1 needs VLLM_ROCM_USE_AITER_MLA=0 on gfx942: AITER's MLA decoder is for "
            "gfx950 (vllm-project/vllm#51964)"
        )
    if aiter and flags.get("--logprobs-mode") not in ("processed_logprobs", "processed_logits"):
        yield (
            "VLLM_ROCM_USE_AITER=1 needs --logprobs-mode processed_logprobs on gfx942: vLLM otherwise takes "
            "AITER's sampler, which crashes there (ROCm/aiter#4830)"
        )
    if (given := variables.get("VLLM_ROCM_USE_AITER_FP4BMM", "0")) != "0":
        yield (
            f"VLLM_ROCM_USE_AITER_FP4BMM={given}: MXFP4 matrices need gfx950 (vllm-project/vllm#34641); "
            "remove it"
        )
    if aiter and variables.get(FP8BMM) != "0":
        yield (
            f"VLLM_ROCM_USE_AITER=1 needs {FP8BMM}=0 on gfx942: vLLM 0.32 otherwise requantises MLA's "
            "projections to FP8 without a word, and its warm-up crashes there"
        )
    if flags.get("--kv-cache-dtype", "auto") not in ("auto", "bfloat16"):
        yield (
            f"--kv-cache-dtype {flags['--kv-cache-dtype']}: nobody has shown that answers stay right with it "
            "on gfx942; use auto"
        )


def unfit_for_gfx950(weights: Weights) -> Iterator[str]:
    """What gfx950 does not do."""
    if weights is Weights.INT4:
        yield "weights int4 is for gfx942 only: gfx950 computes with MXFP4, and vLLM ignores the request"


def unfit_for_cpu(flags: Flags, variables: Variables) -> Iterator[str]:
    """What has no effect without a GPU."""
    for name in flags:
        if name in ("--gpu-memory-utilization", "--kv-cache-memory-bytes"):
            yield f"{name} has no effect on a CPU; VLLM_CPU_KVCACHE_SPACE is what vLLM reads there"
    if (block := _number(flags.get(BLOCK))) is not None and block != CPU_BLOCK:
        yield (
            f"{BLOCK} {flags[BLOCK]}: must be {CPU_BLOCK}, for which the CPU's MLA kernel is compiled and "
            "which vLLM takes whatever is said"
        )
    if flags.get(ATTENTION) != CPU_ATTENTION:
        yield (
            f"{ATTENTION} must be {CPU_ATTENTION}: vLLM otherwise takes kernels for AMX where a CPU has it, "
            "which know bfloat16 alone"
        )
    for name in variables:
        if name.startswith(("AITER_", "HIP_", "HSA_", "NCCL_", "VLLM_ROCM_")):
            yield f"{name} has no effect on a CPU; remove it"


def wrong_sizes(
    *,
    devices: int | None,
    nodes: int,
    tensor: int,
    pipeline: int,
    data: int,
    data_local: int,
    decode_context: int,
) -> Iterator[str]:
    """Numbers of ranks that do not go together.

    Args:
        devices: GPUs of all nodes; ``None`` on CPUs, whose ranks share cores.
    """
    ranks = tensor * pipeline * data
    if devices is not None and ranks != devices:
        yield (
            f"{tensor} x {pipeline} x {data} ranks (tensor x pipeline x data) on {devices} GPUs: each rank "
            "has one GPU and none may idle; make the numbers equal"
        )
    expected = data // nodes if data > 1 else 1
    if data > 1 and data % nodes:
        yield f"data_parallel_size {data}: does not divide evenly among {_nodes(nodes)}; use a multiple"
    elif data_local != expected:
        yield (
            f"data_parallel_size_local {data_local}: {data} data-parallel rank{'s' * (data > 1)} on "
            f"{_nodes(nodes)} are {expected} on each; give {expected}"
        )
    if pipeline % nodes and data == 1:
        yield (
            f"pipeline_parallel_size {pipeline}: on {_nodes(nodes)} each holds whole stages, without data "
            "parallelism; use a multiple of the nodes"
        )
    if tensor % decode_context:
        yield (
            f"decode_context_parallel_size {decode_context}: must divide tensor_parallel_size {tensor}, "
            "whose ranks it reuses"
        )


def set_and_left_open(left_open: Collection[str], flags: Flags, variables: Variables) -> Iterator[str]:
    """What a profile says that it leaves alone, and sets."""
    for name in left_open:
        if name in flags or name in variables:
            yield f"{name} is left open and set; keep one of them"


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count > 1)}"


def _number(value: str | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None
