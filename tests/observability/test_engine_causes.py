# SPDX-License-Identifier: Apache-2.0
"""What only vLLM itself can cause: a real one on the CPU, whose cache is small, gets more than it can answer.

Started by the command that ``kimi-k3 serve --dry-run`` prints, with one option more: no profile gives vLLM so
little cache. Time in the rules goes :data:`FACTOR` times faster.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator

import httpx
import pytest
import yaml

from kimi_k3.checkpoint import make_tiny_checkpoint
from tests.observability.alerting import FILE, of_release, scaled
from tests.observability.prometheus import NAMESPACE, PROGRAM, Prometheus, Target, prometheus
from tests.ports import free_port
from tests.serving.deployment import COMMAND, START_SECONDS, TOY, environment
from tests.sidecar.serving import wait_until

ENGINE_CAUSES = (
    "KimiK3KvCacheSaturated",
    "KimiK3QueueGrows",
    "KimiK3FirstTokenBurnsFast",
    "KimiK3FirstTokenBurnsSlowly",
)
RELEASE = "loaded"
FACTOR = 30
BLOCKS = 23
"""Of the cache: two requests of the greatest length, or the first tokens of four short ones."""

PATIENCE = 240.0

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(PROGRAM is None, reason="no prometheus on this machine; run scripts/programs"),
]


class Engine:
    """The running vLLM, and who asks it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._stop = threading.Event()
        self._random = random.Random(1)

    def answers(self) -> bool:
        """Whether it serves."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", trust_env=False).status_code == 200
        return False

    def ask(self, tokens: int) -> None:
        """One request, of a prompt that nobody has asked before."""
        prompt = self._random.choices(range(256), k=self._random.randint(150, 250))
        body = {"model": "kimi-k3", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        # Who is still waiting when the engine is ended gets no answer.
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{self.url}/v1/completions", json=body, timeout=None, trust_env=False)

    @contextlib.contextmanager
    def crowded(self) -> Iterator[None]:
        """Until the block ends somebody comes more often than anybody can be answered."""

        def come() -> None:
            for _ in itertools.count():
                if self._stop.wait(0.4):
                    return
                threading.Thread(target=self.ask, args=(120,), daemon=True).start()

        coming = threading.Thread(target=come)
        coming.start()
        try:
            yield
        finally:
            self._stop.set()
            coming.join()


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Prometheus]]:
    """A vLLM that has answered a few, and a Prometheus that has seen it do so."""
    directory = tmp_path_factory.mktemp("loaded")
    checkpoint, port = directory / "tiny", free_port()
    make_tiny_checkpoint(checkpoint)
    (directory / "state").mkdir()
    serve = [
        COMMAND,
        "serve",
        str(checkpoint),
        *TOY,
        "--port",
        str(port),
        "--state-dir",
        str(directory / "state"),
    ]
    script = subprocess.run(
        [*serve, "--dry-run"], env=environment(), capture_output=True, text=True, check=True
    ).stdout
    small = script.rstrip().removesuffix(")").rstrip() + f" --num-gpu-blocks-override {BLOCKS}\n)"
    with (directory / "engine.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", small], env=environment(), stdout=log, stderr=log, start_new_session=True
        )
    engine = Engine(f"http://127.0.0.1:{port}")
    try:
        wait_until(lambda: process.poll() is not None or engine.answers(), seconds=START_SECONDS)
        assert process.poll() is None, (directory / "engine.log").read_text(errors="replace")[-4000:]
        # The first request compiles, and is late.
        engine.ask(8)
        (directory / "prometheus").mkdir()
        with prometheus(directory / "prometheus", [Target(RELEASE, engine.url)]) as running:
            # An increase is counted from what was seen before.
            wait_until(lambda: bool(running.values("vllm:time_to_first_token_seconds_count")), seconds=60)
            running.judge(rules(FACTOR))
            yield engine, running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def rules(factor: int) -> dict[str, list[dict[str, object]]]:
    """What the chart makes of the rules for the release, faster."""
    text = of_release(FILE.read_text(), NAMESPACE, RELEASE)
    return {RELEASE: scaled(yaml.safe_load(text)["groups"], factor)}


def test_they_fire_for_their_cause_alone(judged: tuple[Engine, Prometheus]) -> None:
    """Silent while each request is answered before the next one comes; all of them where too many come."""
    engine, running = judged
    for _ in range(15):
        engine.ask(8)
    enough = "namespace_release_model:vllm_first_token:increase1h > 10"
    wait_until(lambda: bool(running.values(enough)), seconds=60)
    assert [alert for alert in ENGINE_CAUSES if running.of(alert)] == []
    with engine.crowded():
        wait_until(lambda: all(map(running.of, ENGINE_CAUSES)), seconds=PATIENCE)
    for fired in itertools.chain.from_iterable(map(running.of, ENGINE_CAUSES)):
        assert fired.labels["release"] == RELEASE
        assert fired.labels["model_name"] == "kimi-k3"
        assert "<no value>" not in fired.annotations["description"]
