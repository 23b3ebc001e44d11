# SPDX-License-Identifier: Apache-2.0
"""Telling vLLM on a CPU about Kimi-K3: through its official hooks, and where it has none, by replacement."""

from __future__ import annotations

from typing import Any


def register_cpu() -> None:
    """Register model classes beside what is shared, and mend what keeps them from running on a CPU."""
    from vllm.model_executor.models import ModelRegistry

    from kimi_k3.contract.facts import Use
    from kimi_k3.engine.contract import check_contract
    from kimi_k3.engine.registration import register_shared

    check_contract(Use.CPU)
    for architecture in ("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM"):
        ModelRegistry.register_model(architecture, f"kimi_k3.engine.cpu.model:{architecture}")
    register_shared()
    _select_cpu_experts()
    _map_text_architecture()
    _accept_manager_blocks()
    _make_room_between_stages()
    _gather_among_data_parallel_ranks()
    _zero_whole_manager_blocks()


def _select_cpu_experts() -> None:
    """Let ``Mxfp4MoEMethod`` find experts classes of ours: stock vLLM has none for SiTU on a CPU.

    The method calls a module-level function to choose its backend; there is no registry to add to.
    """
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.layers.quantization import mxfp4

    from kimi_k3.engine.cpu.experts import Mxfp4CpuExperts

    upstream = mxfp4.select_deepseek_v4_mxfp4_moe_backend

    def select(config: FusedMoEConfig) -> Any:
        if config.activation != MoEActivation.SITU:
            return upstream(config)
        # EMULATION is vLLM's name for "the checkpoint's layout, weights dequantised as they are used". For
        # int4 the plugin's method puts another class in its place.
        return Mxfp4MoeBackend.EMULATION, Mxfp4CpuExperts

    mxfp4.select_deepseek_v4_mxfp4_moe_backend = select


def _map_text_architecture() -> None:
    """Send the text model's compressed-tensors checkpoint to the ``mxfp4`` method as well.

    vLLM has that rewrite for the multimodal architecture only; there is no hook for the map.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    MODELS_CONFIG_MAP["KimiLinearForCausalLM"] = MODELS_CONFIG_MAP["KimiK3ForConditionalGeneration"]


def _accept_manager_blocks() -> None:
    """Accept multiples of the 16-token kernel block in ``CPUMLABackend.supports_block_size``.

    For a hybrid model vLLM's manager grows the block (to 128 here) and splits it into kernel blocks
    of 16, which the backend does support; its check looks at the manager's size.
    """
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    kernel_block = CPUMLABackend.get_supported_kernel_block_sizes()[0]

    def supports_block_size(cls: type, block_size: int | None) -> bool:
        return block_size is None or block_size % kernel_block == 0

    CPUMLABackend.supports_block_size = classmethod(supports_block_size)


def _make_room_between_stages() -> None:
    """Make the tensors that a pipeline stage takes from the one before it in ``CPUModelRunner.load_model``.

    vLLM makes them when it profiles or compiles, and its CPU runner does neither where nothing is compiled;
    the first request then fails with an AssertionError.
    """
    from vllm.distributed import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    upstream = CPUModelRunner.load_model

    def load_model(self: Any, *arguments: Any, **named: Any) -> None:
        upstream(self, *arguments, **named)
        if self.intermediate_tensors is None and not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    CPUModelRunner.load_model = load_model


def _gather_among_data_parallel_ranks() -> None:
    """Give ``CpuCommunicator`` the two methods that its all-to-all manager calls and it lacks."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    from kimi_k3.engine.cpu import communicator

    CpuCommunicator.all_gatherv = communicator.all_gatherv
    CpuCommunicator.reduce_scatterv = communicator.reduce_scatterv


def _zero_whole_manager_blocks() -> None:
    """Zero the blocks that are meant in ``CPUModelRunner._zero_block_ids``.

    vLLM (0.32.0 and 0.33.0) passes the manager's block ids and indexes the KV tensor, whose rows are
    kernel blocks, with them: where a manager block is several kernel blocks, blocks of other
    requests are wiped and their text changes under concurrency.
    """
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def zero_block_ids(self: Any, block_ids: list[int]) -> None:
        for group in self.kv_cache_config.kv_cache_groups:
            if not isinstance(group.kv_cache_spec, FullAttentionSpec):
                continue
            for layer_name in group.layer_names:
                layer = self.compilation_config.static_forward_context.get(layer_name)
                cache: Any = getattr(layer, "kv_cache", None)
                if not isinstance(cache, torch.Tensor):
                    continue
                kernel_blocks = cache.shape[0] // self.kv_cache_config.num_blocks
                for block_id in block_ids:
                    cache[block_id * kernel_blocks : (block_id + 1) * kernel_blocks].zero_()

    CPUModelRunner._zero_block_ids = zero_block_ids
