# SPDX-License-Identifier: Apache-2.0
"""kimi-k3-gfx942: serve Kimi-K3 on gfx942 GPUs with vLLM, and see what it does."""

__version__ = "0.1.0"
