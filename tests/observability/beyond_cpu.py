# SPDX-License-Identifier: Apache-2.0
"""A server that tells what vLLM tells where it drafts and shares prefixes, which the CPU's engine does not.

``python -m tests.observability.beyond_cpu PORT`` counts until its input is closed: of two drafted tokens one
is accepted (by vLLM's own class), and of four tokens of a prompt three are found (counters of vLLM's names).
"""

from __future__ import annotations

import http.server
import select
import sys
import threading
from types import SimpleNamespace

import prometheus_client

TOKENS = 2
"""Drafted at a time, as in the profile ep8-dspark."""

STEP_SECONDS = 0.1
LABELS = ("model_name", "engine")
ENGINE = ("kimi-k3", "0")


class Handler(http.server.BaseHTTPRequestHandler):
    """Plain text, as vLLM's; the client's own server would rename ``vllm:`` for a Prometheus that asks so."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", prometheus_client.CONTENT_TYPE_LATEST)
        self.end_headers()
        self.wfile.write(prometheus_client.generate_latest())

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    """Serve ``/metrics``."""
    # Importing vLLM takes seconds, which only this process is to spend.
    from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

    drafting = SimpleNamespace(num_speculative_tokens=TOKENS)
    told = SpecDecodingProm(drafting, list(LABELS), {0: list(ENGINE)})
    asked, found = (
        prometheus_client.Counter(f"vllm:prefix_cache_{what}", "Tokens.", LABELS).labels(*ENGINE)
        for what in ("queries", "hits")
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while not select.select([sys.stdin], [], [], STEP_SECONDS)[0]:
        step = SpecDecodingStats.new(TOKENS)
        step.observe_draft(num_draft_tokens=TOKENS, num_accepted_tokens=1)
        told.observe(step)
        asked.inc(4)
        found.inc(3)


if __name__ == "__main__":
    main()
