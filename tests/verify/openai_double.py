# SPDX-License-Identifier: Apache-2.0
"""A server of the OpenAI API whose model is a table: it answers a question right, or as a test wants."""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any

from kimi_k3.verify.predictions import Asked, questions

VOCABULARY = 50
"""Tokens that are predicted; a word of the text counts as the one of its number, modulo this."""


@dataclass
class Model:
    """What is served.

    Attributes:
        noise: standard deviation of what is added to the logits, by a seed of its own.
        right: share of the questions that are answered right.
        fails_after: requests to /v1/completions after which the server closes every connection.
        status: of each answer to /v1/completions.
    """

    noise: float = 0.0
    seed: int = 0
    right: float = 1.0
    fails_after: int | None = None
    status: int = 200
    url: str = ""
    asked: int = 0
    known: dict[str, Asked] = field(default_factory=dict)
    words: dict[int, str] = field(default_factory=dict)
    authorized: set[str | None] = field(default_factory=set)

    def learn(self, seed: int, count: int) -> None:
        """The answers to these questions."""
        self.known = {one.example.question: one for one in questions(seed, count)}

    def tokens(self, text: str) -> list[int]:
        """A word is a token, with the space after it."""
        found = re.findall(r"\S+\s*|\s+", text)
        tokens = [zlib.crc32(word.encode()) for word in found]
        self.words |= dict(zip(tokens, found, strict=True))
        return tokens

    def answer(self, text: str) -> str:
        """To the last question of a prompt."""
        question = text.rsplit("Question: ", 1)[1].removesuffix("\nAnswer:")
        one = self.known[question]
        wrong = Random(question).random() >= self.right
        return " #### nothing" if wrong else f" {one.example.answer}"

    def row(self, before: list[int], token: int) -> dict[str, dict[str, float]]:
        """The 20 likeliest tokens after some others, and the text's own."""
        context = "".join(self.words[one] for one in before[-3:])
        exact, noisy = Random(context), Random(f"{self.seed}/{context}")
        logits = [exact.gauss(0, 3) + self.noise * noisy.gauss(0, 1) for _ in range(VOCABULARY)]
        logits[token % VOCABULARY] += 8
        total = math.log(math.fsum(math.exp(logit) for logit in logits))
        best = sorted(range(VOCABULARY), key=lambda one: -logits[one])[:20]
        own = token % VOCABULARY
        return {str(token if one == own else one): {"logprob": logits[one] - total} for one in {*best, own}}


@contextlib.contextmanager
def serving(model: Model) -> Iterator[Model]:
    """The server, on a port of its own."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "kimi-k3", "max_model_len": 1024}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                with lock:
                    self._send(200, {"tokens": model.tokens(body["prompt"])})
                return
            with lock:
                model.asked += 1
                model.authorized.add(self.headers.get("Authorization"))
                gone = model.fails_after is not None and model.asked > model.fails_after
            if gone:
                self.close_connection = True
                return
            self._send(model.status, self._completion(body))

        def _completion(self, body: dict[str, Any]) -> Any:
            prompt = body["prompt"]
            if "prompt_logprobs" not in body:
                return {"choices": [{"text": model.answer("".join(model.words[token] for token in prompt))}]}
            rows = [None, *(model.row(prompt[:at], prompt[at]) for at in range(1, len(prompt)))]
            return {"choices": [{"text": "", "prompt_logprobs": rows}]}

        def _send(self, status: int, answer: Any) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        model.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield model
        finally:
            server.shutdown()
            thread.join()
