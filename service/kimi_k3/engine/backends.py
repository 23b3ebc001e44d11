# SPDX-License-Identifier: Apache-2.0
"""Asks vLLM which back end it would take for the experts, and of the others why not.

``python -m kimi_k3.engine.backends REQUEST`` prints one line of JSON behind a mark, among whatever vLLM
prints. In a process of its own: importing vLLM takes seconds, and its modules may end a process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from kimi_k3.words.backends import AITER_INT4, CPU_INT4, CPU_MXFP4, MARK, Answer, Request, Row, Verdict

_VLLMS = {
    "AITER_MXFP4_BF16": "MXFP4 weights, bf16 activations: AITER's own kernels for gfx950",
    "AITER_TRITON_MXFP4_BF16": "MXFP4 weights, bf16 activations: AITER's Triton kernel (a16w4)",
    "AITER_MXFP4_FP8": "MXFP4 weights, FP8 activations: AITER's Triton kernel (w4a8)",
    "AITER_MXFP4_MXFP4": "MXFP4 weights and activations: AITER's own kernels (w4a4)",
    "CPU": "MXFP4 weights on a CPU: AMX kernels",
    "EMULATION": "MXFP4 weights, dequantised as they are used: exact and slow",
}
"""vLLM's names of the back ends that can be thought of here, and what each computes."""

_OURS = {
    AITER_INT4: ("gfx942", True, "int4 weights, bf16 activations: AITER's FlyDSL kernels (this plugin)"),
    CPU_INT4: ("cpu", True, "int4 weights on a CPU: readable torch (this plugin)"),
    CPU_MXFP4: ("cpu", False, "MXFP4 weights on a CPU: readable torch (this plugin)"),
}
"""The plugin's: where they are, whether they are for int4, and what each computes."""


def ask(request: Request) -> Answer:
    """What vLLM answers in this process, on this machine."""
    import vllm
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    config = VllmConfig()
    with set_current_vllm_config(config):
        moe = layer(request)
        rows = (*_of_vllm(moe, request), *_of_plugin(moe, request))
    return Answer(
        vllm=vllm.__version__,
        platform=current_platform.device_name,
        architecture=architecture(),
        rows=rows,
    )


def architecture() -> str | None:
    """LLVM's name of the GPU; ``None`` on other platforms than ROCm."""
    from vllm.platforms import current_platform

    if not current_platform.is_rocm():
        return None
    from vllm.platforms import rocm

    return str(rocm._GCN_ARCH)


def layer(request: Request) -> Any:
    """vLLM's ``FusedMoEConfig`` of one layer's experts on one rank, without communication."""
    import torch
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig, RoutingMethodType
    from vllm.platforms import current_platform

    return FusedMoEConfig(
        num_experts=request.experts,
        experts_per_token=request.top_k,
        hidden_dim=request.hidden,
        intermediate_size=request.intermediate,
        num_local_experts=request.local_experts,
        num_logical_experts=request.experts,
        activation=MoEActivation.SITU,
        # vLLM's gates ask only whether there are any.
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        device=current_platform.device_type,
        routing_method=RoutingMethodType.DeepSeekV3,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )


def _of_vllm(moe: Any, request: Request) -> Iterator[Row]:
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4
    from vllm.model_executor.layers.quantization.mxfp4 import _use_k3_situ_aiter
    from vllm.platforms import current_platform

    considered = [backend.value for backend in mxfp4._get_priority_backends()]
    native = _use_k3_situ_aiter(moe)
    chosen = None
    for name, what in _VLLMS.items():
        backend = next((each for each in mxfp4.Mxfp4MoeBackend if each.value == name), None)
        if backend is None:
            yield Row(name=name, what=what, verdict=Verdict.NO, why="this version of vLLM does not have it")
            continue
        why = "its gate for Kimi-K3 on gfx950 is open" if native and name == "AITER_MXFP4_BF16" else None
        lack = None if why else _lack(moe, backend)
        if lack is not None:
            yield Row(name=name, what=what, verdict=Verdict.NO, why=lack)
        elif name not in considered:
            yield Row(
                name=name, what=what, verdict=Verdict.POSSIBLE, why="vLLM takes it only if --moe-backend asks"
            )
        elif request.int4:
            yield Row(name=name, what=what, verdict=Verdict.POSSIBLE, why="it would serve without int4")
        elif chosen is None and not current_platform.is_cpu():
            chosen = name
            yield Row(
                name=name, what=what, verdict=Verdict.CHOSEN, why=why or "the first that vLLM supports here"
            )
        else:
            yield Row(name=name, what=what, verdict=Verdict.POSSIBLE, why=f"vLLM prefers {chosen}")


def _lack(moe: Any, backend: Any) -> str | None:
    """Why vLLM's classes for a back end cannot serve the layer; ``None`` if one can."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static

    lack = "it has no kernel"
    activation = mxfp4._backend_activation_key(backend)
    try:
        for kernel in mxfp4.backend_to_kernel_cls(backend):
            supported, reason = kernel.is_supported_config(
                kernel,
                moe,
                kMxfp4Static,
                activation,
                modular_kernel.FusedMoEActivationFormat.Standard,
            )
            if supported:
                return None
            lack = reason or lack
            # vLLM's name of a scheme is a line long.
            lack = lack.replace(f"{kMxfp4Static}x{activation}", "MXFP4 weights with these activations here")
    except Exception as error:  # whatever an import of kernels for other machines raises here
        return f"its kernels cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
    return lack


def _of_plugin(moe: Any, request: Request) -> Iterator[Row]:
    from kimi_k3.engine.choice import missing_for_int4

    for name, (where, int4, what) in _OURS.items():
        if where not in _here():
            verdict, why = Verdict.NO, f"only on {where}"
        elif int4 and (lack := missing_for_int4(moe)) is not None:
            verdict, why = Verdict.NO, lack
        elif int4 is request.int4:
            verdict, why = Verdict.CHOSEN, "int4 is asked for" if int4 else "vLLM has no SiTU on a CPU"
        else:
            verdict, why = (
                Verdict.POSSIBLE,
                "with --weights int4, by consent" if int4 else "with --weights mxfp4",
            )
        yield Row(name=name, what=what, verdict=verdict, why=why)


def _here() -> str:
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else architecture() or current_platform.device_name


def main(argument: str) -> int:
    """Answer one request, given as JSON."""
    answer = ask(Request.model_validate_json(argument))
    print(f"\n{MARK}{answer.model_dump_json()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
