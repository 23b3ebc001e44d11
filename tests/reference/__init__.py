# SPDX-License-Identifier: Apache-2.0
"""The independent truth the engine is compared with; nothing here imports vLLM or ``kimi_k3``."""
