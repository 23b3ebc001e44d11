# SPDX-License-Identifier: Apache-2.0
"""What value each flag takes, by vLLM 0.32's parser and validators and by what this product serves. Pure.

vLLM would say so itself, after its imports, and in a page of text.
"""

from __future__ import annotations

import json

from kimi_k3.errors import nearest

SWITCHES = frozenset(
    {
        "--enable-auto-tool-choice",
        "--enable-ep-weight-filter",
        "--enforce-eager",
        "--language-model-only",
        "--no-enable-chunked-prefill",
        "--no-enable-prefix-caching",
        "--trust-remote-code",
    }
)
"""Flags without a value."""

COUNTS = frozenset(
    {
        "--block-size",
        "--distributed-timeout-seconds",
        "--kv-cache-memory-bytes",
        "--max-model-len",
        "--max-num-batched-tokens",
        "--max-num-seqs",
    }
)
"""Flags whose value is a whole number from 1 to :data:`MOST`."""

MOST = 10**15
"""More than any count that serves, and exact as a number of any kind."""

CPU_ATTENTION = "CPU_MLA"
"""The one that reads a CPU's cache, in any type."""

SHARES = frozenset({"--gpu-memory-utilization"})
"""Flags whose value is a number."""

OBJECTS = frozenset({"--compilation-config", "--speculative-config"})
"""Flags whose value is a JSON object."""

CHOICES = {
    "--all2all-backend": (
        "allgather_reducescatter",
        "deepep_high_throughput",
        "deepep_low_latency",
        "mori_high_throughput",
        "mori_low_latency",
    ),
    "--attention-backend": (CPU_ATTENTION, "TRITON_MLA"),
    "--distributed-executor-backend": ("mp",),
    "--dtype": ("auto", "bfloat16", "float", "float16", "float32", "half"),
    "--logprobs-mode": ("processed_logits", "processed_logprobs", "raw_logits", "raw_logprobs"),
    "--mm-encoder-tp-mode": ("data", "weights"),
    "--reasoning-parser": ("kimi_k3",),
    "--safetensors-load-strategy": ("eager", "lazy", "prefetch", "torchao"),
    "--tool-call-parser": ("kimi_k3",),
}
"""Flags with a choice. Of vLLM's own choices these are left out: backends that it replaced, that are NVIDIA's
or that refuse quantised experts; Ray; parsers of what other models write."""


def wrong_value(name: str, value: int | float | str | None) -> str | None:
    """Why the flag ``name`` cannot have ``value``, and what to do; ``None`` if it can or is not known."""
    if name in SWITCHES:
        return None if value is None else f"{name} {value}: is a switch; give it no value"
    if value is None:
        return f"{name}: needs a value; give one" if name in VALUED else None
    wrong = _wrong(name, value)
    return None if wrong is None else f"{name} {value}: {wrong}"


VALUED = COUNTS | SHARES | OBJECTS | CHOICES.keys()
"""Flags that need a value."""


def _wrong(name: str, value: int | float | str) -> str | None:
    if name in COUNTS and not (isinstance(value, int) and 1 <= value <= MOST):
        return f"must be a whole number; give one from 1 to {MOST}"
    if name in SHARES and not (isinstance(value, int | float) and abs(value) <= MOST):
        return "must be a number; give one, e.g. 0.9"
    if name in CHOICES and value not in CHOICES[name]:
        return f"is no choice for a profile of Kimi-K3; {nearest(str(value), CHOICES[name])}"
    if name in OBJECTS and not _is_object(value):
        return 'must be a JSON object; give one, e.g. {"mode": 3}'
    return None


def _is_object(value: int | float | str) -> bool:
    try:
        return isinstance(json.loads(str(value)), dict)
    except (ValueError, RecursionError):
        return False
