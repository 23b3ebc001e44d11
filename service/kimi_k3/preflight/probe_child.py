# SPDX-License-Identifier: Apache-2.0
"""Compiles one int4 kernel of AITER for gfx942: ``python -P probe_child.py STAGE``. Needs no GPU.

By AITER's own way of compiling ahead of time (``aiter.aot.flydsl.moe``), with Kimi-K3's shapes on one of
eight GPUs. A process of its own, without this package: what cannot be compiled ends it.

Exit codes: 0 compiled, 1 not, 3 nothing was tried.
"""

from __future__ import annotations

import importlib
import resource
import sys

KERNELS = {
    "1": "flydsl_moe1_abf16_wint4_bf16_t32x128x128",
    "2": "flydsl_moe2_abf16_wint4_bf16_t32x128x128_atomic",
}
"""What AITER falls back to without a tuned row; the second adds with the instruction that made trouble."""

SHAPE = {"model_dim": 3584, "inter_dim": 3072, "experts": 112, "topk": 15}
"""Of a rank with expert parallelism over eight GPUs; AITER is then asked for 15 of a token's 16 experts."""

JOB = {
    "act": "situv2",
    "block_m": 32,
    "cu_num": 304,
    "doweight_stage1": False,
    "enable_bias": False,
    "token_num": 16,
}


def main(stage: str) -> int:
    """Compile the kernel of ``stage``."""
    # The end by abort is expected; nobody needs gigabytes of core.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    name = KERNELS[stage]
    try:
        compiler = importlib.import_module("aiter.aot.flydsl.moe")
        parameters = compiler.get_flydsl_kernel_params(name)
        compile_one = compiler.compile_one_config
    except Exception as error:
        print(f"AITER's compiler cannot be used: {type(error).__name__}: {error}", flush=True)
        return 3
    if parameters is None:
        print(f"AITER knows no kernel {name}", flush=True)
        return 3
    result = compile_one(kernel_name=name, **SHAPE, **{**JOB, **parameters})
    if result.get("compile_time") is None:
        return 1
    print(f"{name} in {result['compile_time']:.1f} s for {result.get('compile_arch', 'gfx942')}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
