# SPDX-License-Identifier: Apache-2.0
"""Running vLLM's own Kimi-K3 model class on a CPU.

The model class, the weight loader, the quantisation method and the conversion are those that run on
a GPU; only operations that exist as GPU kernels alone have PyTorch stand-ins here. They follow the
contracts of the kernels in vLLM 0.32.0 (``vllm/models/kimi_k3/amd/ops``) and are meant to be right,
not fast.
"""
