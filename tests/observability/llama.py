# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with a small Llama of random weights, for what Kimi-K3 in miniature does not do on a CPU.

Without a GPU vLLM itself turns prefix caching off for a model with MLA (``platforms/cpu.py``), and no draft
model exists in miniature. A Llama has its prefixes cached there, and its tokens are drafted by looking up the
last ones in the text so far, which takes no model. The counters are those of any model.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.serving.deployment import Family
from tests.sidecar.serving import wait_until
from tests.surroundings import SURROUNDINGS

NAME = "llama"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
DRAFTING = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}
"""Two tokens at a time, as in the profile ep8-dspark."""

PROMPT = [3 + token % 7 for token in range(160)]
"""Longer than a block of the cache, so that it is found the second time."""


@dataclass(frozen=True)
class Llama:
    """A server that may still be starting."""

    url: str
    log: Path

    def wait(self) -> None:
        """Until it serves."""

        def healthy() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/health", timeout=5).is_success
            return False

        wait_until(healthy, seconds=300)

    def ask(self) -> None:
        """A text twice: its prefix is found, and some of what is drafted is right: it repeats itself."""
        body = {
            "model": NAME,
            "prompt": PROMPT,
            "max_tokens": 40,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
        }
        for _ in range(2):
            httpx.post(f"{self.url}/v1/completions", json=body, timeout=120).raise_for_status()


@contextlib.contextmanager
def llama(directory: Path) -> Iterator[Llama]:
    """Start it, without our plugin, and end it; no process stays."""
    model, log, port = directory / "model", directory / "llama.log", free_port()
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", NAME, "--port", str(port)),
        *("--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"),
        *("--max-model-len", "256", "--max-num-seqs", "4"),
        *("--speculative-config", json.dumps(DRAFTING)),
    ]
    alone = SURROUNDINGS | {"VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=directory, env=alone, stdout=output, stderr=subprocess.STDOUT)
    family = Family(process.pid)
    try:
        yield Llama(f"http://127.0.0.1:{port}", log)
    finally:
        family.look()
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()
        family.kill()
