# SPDX-License-Identifier: Apache-2.0
"""What the plugin registers on every platform that it serves on."""

from __future__ import annotations


def register_shared() -> None:
    """The quantisation method of the experts and the loader that reports, through vLLM's official hooks."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from kimi_k3.engine.loader import LOAD_FORMAT, ReportingModelLoader
    from kimi_k3.engine.moe import KimiK3Mxfp4Config

    register_quantization_config("mxfp4")(KimiK3Mxfp4Config)
    register_model_loader(LOAD_FORMAT)(ReportingModelLoader)
