# SPDX-License-Identifier: Apache-2.0
"""A server that tells what vLLM tells of speculative decoding, by vLLM's own class: no draft runs on a CPU.

``python -m tests.observability.drafts PORT`` counts until its input is closed: of two drafted tokens one is
accepted.
"""

from __future__ import annotations

import select
import sys
from types import SimpleNamespace

import prometheus_client

TOKENS = 2
"""Drafted at a time, as in the profile ep8-dspark."""

STEP_SECONDS = 0.1


def main() -> None:
    """Serve ``/metrics``."""
    # Importing vLLM takes seconds, which only this process is to spend.
    from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

    drafting = SimpleNamespace(num_speculative_tokens=TOKENS)
    told = SpecDecodingProm(drafting, ["model_name", "engine"], {0: ["kimi-k3", "0"]})  # type: ignore[arg-type]
    prometheus_client.start_http_server(int(sys.argv[1]), addr="127.0.0.1")
    while not select.select([sys.stdin], [], [], STEP_SECONDS)[0]:
        step = SpecDecodingStats.new(TOKENS)
        step.observe_draft(num_draft_tokens=TOKENS, num_accepted_tokens=1)
        told.observe(step)


if __name__ == "__main__":
    main()
