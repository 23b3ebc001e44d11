# SPDX-License-Identifier: Apache-2.0
"""Layers of routed experts in vLLM's real classes on a doubled ROCm platform: ``python -P layer.py CASES``.

Run in a process of its own, with the doubles, one version of vLLM's source and the product on the path. All
that is bent is where vLLM computes: its ROCm platform registers operators for, and puts tensors on, the CPU,
which has no cache to empty. Each case is a start of its own as far as a process can have several.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch


def main(cases: dict[str, dict[str, Any]]) -> int:
    """Run the cases; print for each what came of it."""
    from vllm.platforms.rocm import RocmPlatform

    RocmPlatform.dispatch_key, RocmPlatform.device_type = "CPU", "cpu"
    torch.accelerator.empty_cache = lambda: None
    original = dict(os.environ)
    for name, case in cases.items():
        os.environ.clear()
        os.environ.update(original | case.get("environment", {}))
        _forget()
        try:
            told = run(case)
        except Exception as error:
            told = {"error": str(error), "type": type(error).__name__}
        print(f"\nTOLD {json.dumps({'case': name, **told})}", flush=True)
    return 0


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One start, up to one batch of tokens through the layer."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.workspace import init_workspace_manager

    arguments: dict[str, Any] = {
        "model": case["checkpoint"],
        "dtype": "bfloat16",
        "max_model_len": 256,
        "logprobs_mode": "processed_logprobs",
    }
    if case.get("int4", True):
        arguments["quantization_config"] = {"moe": {"weight": "int4_per_group_32"}}
    _bend(case)
    config = EngineArgs(**(arguments | case.get("arguments", {}))).create_engine_config()
    for path, value in case.get("configuration", {}).items():
        part, _, name = path.partition(".")
        setattr(getattr(config, part) if name else config, name or part, value)
    with set_current_vllm_config(config):
        _one_rank()
        init_workspace_manager(torch.device("cpu"))
        return serve(config, case)


def serve(config: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Build the layer, load it, let it be processed, compute."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
    from vllm.model_executor.utils import weights_already_processed

    tensors = np.load(case["weights"])
    experts, intermediate, hidden = tensors["w1"].shape[0], tensors["w1"].shape[1], tensors["w1"].shape[2] * 2
    for number in range(case.get("layers", 1)):
        runner = FusedMoEFactory(
            num_experts=experts,
            top_k=2,
            hidden_size=hidden,
            intermediate_size=intermediate,
            activation=case.get("activation", "situ"),
            activation_situ_beta=4.0,
            activation_situ_linear_beta=case.get("linear_beta", 25.0),
            quant_config=config.quant_config,
            prefix=f"model.layers.{number + 1}.block_sparse_moe.experts",
            scoring_func="sigmoid",
            ckpt_names=("w1", "w2", "w3"),
        )
    layer = runner.routed_experts
    for shard in ("w1", "w2", "w3"):
        name = "w2" if shard == "w2" else "w13"
        for expert in range(experts):
            for part, suffix in ((shard, "weight"), (f"{shard}_scale", "weight_scale")):
                parameter = getattr(layer, f"{name}_{suffix}")
                loaded = torch.from_numpy(tensors[part][expert])
                layer.weight_loader(parameter, loaded, f"experts.{name}_{suffix}", shard, expert)
    before = layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()
    with weights_already_processed() if case.get("processed") else nullcontext():
        for _ in range(case.get("times", 1)):
            layer.quant_method.process_weights_after_loading(layer)
    if case.get("reload"):
        from vllm.v1.worker.gpu_worker import Worker

        Worker.reload_weights(object())
    kernel = layer.quant_method.moe_kernel
    told = {
        "method": type(layer.quant_method).__name__,
        "vllm_backend": layer.quant_method.mxfp4_backend.value,
        "experts": type(kernel.fused_experts).__name__,
        "eplb": layer.quant_method.supports_eplb,
        "in_place": before == (layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()),
    }
    if "kimi_k3.engine.moe" in sys.modules:
        from kimi_k3.engine.reporter import rank_reporter

        record = rank_reporter().record
        told["backend"] = record.backend
        told["signs"] = None if record.proof is None else record.proof.signs_right
        told["did"] = None if record.requantisation is None else str(record.requantisation)
    if not case.get("int4", True):
        return told
    output, tokens = compute(layer, experts, hidden)
    from aiter import fused_moe

    handed, calls = fused_moe.CALLS[-1], len(fused_moe.CALLS)
    names = ("w1", "w2", "w1_scale", "w2_scale")
    np.savez(
        case["result"],
        tokens=tokens.float().numpy(),
        output=output.float().numpy(),
        **{name: handed[name].contiguous().view(torch.uint8).numpy() for name in names},
    )
    if case.get("half"):
        told["half"] = prove_half(layer)
    return told | {
        "calls": calls,
        "shapes": {name: list(handed[name].shape) for name in names},
        "dtypes": {name: str(handed[name].dtype).removeprefix("torch.") for name in names},
    }


def prove_half(layer: Any) -> float:
    """The canary of a rank that has half of the experts, and AITER's mask of them."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    from kimi_k3.engine.backend import _expert_map, kernel
    from kimi_k3.engine.proof import TOKENS, Situ, Size, prove

    moe = dataclasses.replace(layer.moe_config, num_local_experts=layer.moe_config.num_experts // 2)
    _, numbers, mask = determine_expert_map(2, 0, moe.num_experts, return_expert_mask=True)
    cpu = torch.device("cpu")
    for consumes_mask, theirs in ((True, mask), (False, numbers)):
        ours = _expert_map(moe, consumes_mask=consumes_mask, device=cpu)
        assert ours is not None
        assert torch.equal(ours, theirs)
    size = Size(
        moe.hidden_dim, moe.intermediate_size_per_partition, moe.num_local_experts, moe.experts_per_token
    )
    computed = kernel(layer.quant_method.backend, moe)
    batches = (*TOKENS, 128)
    return prove(computed, size, situ=Situ(4.0, 25.0), signs=True, device=cpu, batches=batches).error


def compute(layer: Any, experts: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Five tokens through two neighbouring experts each, with equal weights."""
    tokens = torch.randn(5, hidden, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    ids = torch.tensor([[(token + slot) % experts for slot in range(2)] for token in range(5)])
    weights = torch.full((5, 2), 0.5)
    return layer.quant_method.apply(layer, tokens, weights, ids.to(torch.int32), None, None), tokens


def _bend(case: dict[str, Any]) -> None:
    """What only happens on other ranks, or in a vLLM that does not do what it says."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.quantization import mxfp4

    global _UPSTREAM_GATE
    _UPSTREAM_GATE = _UPSTREAM_GATE or mxfp4._use_k3_situ_int4_gfx942
    mxfp4._use_k3_situ_int4_gfx942 = (lambda moe: False) if case.get("deaf") else _UPSTREAM_GATE
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.local_rank = case.get("local_rank", 0)


_UPSTREAM_GATE: Any = None


def _one_rank() -> None:
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    if not model_parallel_is_initialized():
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)


def _forget() -> None:
    """What processes keep for their one start."""
    import aiter.fused_moe
    import vllm.logger
    from vllm._aiter_ops import rocm_aiter_ops

    rocm_aiter_ops.refresh_env_variables()
    vllm.logger._print_warning_once.cache_clear()
    aiter.fused_moe.CALLS.clear()
    if "kimi_k3.engine.moe" in sys.modules:
        from kimi_k3.engine import choice
        from kimi_k3.engine.reporter import rank_reporter

        choice._proofs.clear()
        rank_reporter.cache_clear()


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text())))
