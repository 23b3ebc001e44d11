# SPDX-License-Identifier: Apache-2.0
"""What only vLLM itself can cause."""

ENGINE_CAUSES = (
    "KimiK3KvCacheSaturated",
    "KimiK3QueueGrows",
    "KimiK3FirstTokenBurnsFast",
    "KimiK3FirstTokenBurnsSlowly",
)
