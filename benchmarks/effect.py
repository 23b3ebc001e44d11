# SPDX-License-Identifier: Apache-2.0
"""What the sidecar costs the engine: tokens a second with and without it, in pairs of one run.

``.venv/bin/python -m benchmarks.effect``. A real vLLM on the CPU serves the tiny checkpoint to a constant
number of clients, on the same cores as the sidecar: a harder neighbourhood than a GPU's. In one half of each
pair, in random order, the sidecar is stopped (SIGSTOP: it gets no core at all); in the other it is watched as
in a cluster: probes and a scrape every few seconds, one page. Tokens are the engine's own count. Prints a row
for RESULTS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from tests.serving.deployment import Deployment, Mode, started

from kimi_k3.checkpoint import make_tiny_checkpoint

CLIENTS = 4
TOKENS = 64
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
WATCHED_EVERY_SECONDS = {"/startupz": 5.0, "/readyz": 5.0, "/livez": 10.0, "/metrics": 15.0}
SETTLE_SECONDS = 0.5


@dataclass(frozen=True)
class Pair:
    """Tokens a second in the two halves."""

    without: float
    watched: float

    @property
    def loss(self) -> float:
        """What is lost with the sidecar, as a share."""
        return 1 - self.watched / self.without


@contextlib.contextmanager
def at_once(works: list[Callable[[threading.Event], None]]) -> Iterator[None]:
    """Each in a thread of its own, which is to end soon after the event is set, at the block's end."""
    done = threading.Event()
    threads = [threading.Thread(target=work, args=(done,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def clients(deployment: Deployment) -> AbstractContextManager[None]:
    """A constant number of completions under way until the block ends."""

    def ask(done: threading.Event) -> None:
        while not done.is_set():
            deployment.complete(PROMPT, TOKENS)

    return at_once([ask] * CLIENTS)


def watched(url: str) -> AbstractContextManager[None]:
    """Probes, a scrape and one page, until the block ends."""

    def ask(path: str, every: float, done: threading.Event) -> None:
        while not done.is_set():
            httpx.get(url + path, timeout=10)
            done.wait(every)

    def listen(done: threading.Event) -> None:
        # Something comes at least every 15 s.
        with httpx.stream("GET", url + "/events", timeout=30) as stream:
            for _ in stream.iter_bytes():
                if done.is_set():
                    return

    return at_once([partial(ask, path, every) for path, every in WATCHED_EVERY_SECONDS.items()] + [listen])


def tokens(engine_url: str) -> float:
    """How many tokens the engine has generated so far."""
    text = httpx.get(engine_url + "/metrics", timeout=30).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:generation_tokens_total"
    )


def rate(engine_url: str, seconds: float) -> float:
    """Tokens a second over so many seconds."""
    time.sleep(SETTLE_SECONDS)
    before, began = tokens(engine_url), time.monotonic()
    time.sleep(seconds)
    after, ended = tokens(engine_url), time.monotonic()
    return (after - before) / (ended - began)


def sidecar_of(deployment: Deployment) -> psutil.Process:
    """The sidecar's process, which this one started."""
    port = deployment.sidecar_url.rpartition(":")[2]
    [found] = [one for one in psutil.Process().children() if port in one.cmdline()]
    return found


def measure(deployment: Deployment, pairs: int, seconds: float, chooser: random.Random) -> list[Pair]:
    """Both halves of each pair, in random order."""
    sidecar = sidecar_of(deployment)
    found = []
    with clients(deployment):
        rate(deployment.engine_url, seconds)
        for _ in range(pairs):
            rates = {}
            for half in chooser.sample(["without", "watched"], 2):
                if half == "without":
                    sidecar.send_signal(signal.SIGSTOP)
                    rates[half] = rate(deployment.engine_url, seconds)
                    sidecar.send_signal(signal.SIGCONT)
                else:
                    with watched(deployment.sidecar_url):
                        rates[half] = rate(deployment.engine_url, seconds)
            found.append(Pair(**rates))
            print(f"{rates['without']:.1f} {rates['watched']:.1f} {found[-1].loss:+.2%}", flush=True)
    return found


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each half")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "tiny"
        make_tiny_checkpoint(checkpoint)
        with started(checkpoint, Path(directory), Mode(weights="int4")) as deployment:
            pairs = measure(deployment, given.pairs, given.seconds, random.Random(given.seed))
    losses = [pair.loss for pair in pairs]
    error = 1.96 * statistics.stdev(losses) / math.sqrt(len(losses))
    print("| pairs | tokens/s without | tokens/s watched | lost, mean and 95 % | lost, median |")
    print("|---|---|---|---|---|")
    print(
        f"| {len(pairs)} of {given.seconds:g} s | {statistics.mean(pair.without for pair in pairs):.1f} "
        f"| {statistics.mean(pair.watched for pair in pairs):.1f} "
        f"| {statistics.mean(losses):+.2%} ± {error:.2%} | {statistics.median(losses):+.2%} |"
    )


if __name__ == "__main__":
    main()
