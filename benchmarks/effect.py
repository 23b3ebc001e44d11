# SPDX-License-Identifier: Apache-2.0
"""What the sidecar costs the engine: tokens a second with and without it, in pairs of one run.

``.venv/bin/python -m benchmarks.effect``. A real vLLM on the CPU serves the tiny checkpoint to a constant
number of clients, on one core. ``--sidecar`` says where the sidecar is: ``shared``, on that core, a harder
neighbourhood than a GPU's; ``apart``, on the other one, with the clients, as on a node with cores to spare;
``free``, where the kernel puts everything. In one half of each pair, in random order, the sidecar is stopped
(SIGSTOP: it gets no core at all); in the other it is watched as in a cluster: probes and a scrape every few
seconds, one page. Tokens are the engine's own count. Prints a row for RESULTS.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from tests.serving.deployment import Deployment, Mode, started

from benchmarks.load import Connection, cpu_seconds, request
from kimi_k3.checkpoint import make_tiny_checkpoint

CLIENTS = 4
TOKENS = 900
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
WATCHED_EVERY_SECONDS = {"/startupz": 5.0, "/readyz": 5.0, "/livez": 10.0, "/metrics": 15.0}
SETTLE_SECONDS = 0.1


@dataclass(frozen=True)
class Pair:
    """Tokens a second in the two halves."""

    without: float
    watched: float

    @property
    def loss(self) -> float:
        """What is lost with the sidecar, as a share."""
        return 1 - self.watched / self.without


def ask_the_engine(url: str) -> None:
    """A constant number of completions under way, until this process is ended."""

    def ask() -> None:
        body = {"model": "kimi-k3", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
        with httpx.Client(timeout=300) as client:
            while True:
                client.post(url + "/v1/completions", json=body).raise_for_status()

    for _ in range(CLIENTS):
        threading.Thread(target=ask).start()


def watch_the_sidecar(port: int, running: float) -> None:
    """Probes, a scrape and one page, until this process is ended.

    A sidecar that runs a share of the time, ``running``, answers in it what fell due meanwhile.
    """

    async def ask(path: str, every: float) -> None:
        connection = Connection(port)
        while True:
            await connection.get(path)
            await asyncio.sleep(every)

    async def listen() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/events"))
        while await reader.readline():
            pass

    async def all_of_it() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(listen())
            for path, every in WATCHED_EVERY_SECONDS.items():
                group.create_task(ask(path, every / running))

    asyncio.run(all_of_it())


@contextlib.contextmanager
def beside(work: Callable[..., None], *arguments: object) -> Iterator[None]:
    """A process of its own for ``work``, so that neither waits for the other's interpreter."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    try:
        yield
        assert process.is_alive(), f"{work.__name__} has ended"
    finally:
        process.kill()
        process.join()


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


def sidecar_of(deployment: Deployment) -> tuple[psutil.Process, int]:
    """The sidecar's process, which this one started, and its port."""
    port = deployment.sidecar_url.rpartition(":")[2]
    [found] = [one for one in psutil.Process().children() if port in one.cmdline()]
    return found, int(port)


def measure(deployment: Deployment, pairs: int, seconds: float, chooser: random.Random) -> list[Pair]:
    """Both halves of each pair, in random order."""
    sidecar, port = sidecar_of(deployment)
    found = []
    with beside(ask_the_engine, deployment.engine_url), beside(watch_the_sidecar, port, 0.5):
        rate(deployment.engine_url, 10.0)
        for _ in range(pairs):
            rates = {}
            for half in chooser.sample(["without", "watched"], 2):
                sidecar.send_signal(signal.SIGSTOP if half == "without" else signal.SIGCONT)
                rates[half] = rate(deployment.engine_url, seconds)
            sidecar.send_signal(signal.SIGCONT)
            found.append(Pair(**rates))
            print(f"{rates['without']:.1f} {rates['watched']:.1f} {found[-1].loss:+.2%}", flush=True)
    with beside(ask_the_engine, deployment.engine_url), beside(watch_the_sidecar, port, 1.0):
        time.sleep(10.0)
        before, began = cpu_seconds(sidecar), time.monotonic()
        time.sleep(30.0)
        share = (cpu_seconds(sidecar) - before) / (time.monotonic() - began)
        print(f"the sidecar itself, watched so: {share:.2%} of a core of {psutil.cpu_count()}")
    return found


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each half")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sidecar", choices=("shared", "apart", "free"), default="shared")
    given = parser.parse_args()
    cores = os.sched_getaffinity(0)
    shared, other = (cores, cores) if given.sidecar == "free" else ({core} for core in sorted(cores)[:2])
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "tiny"
        make_tiny_checkpoint(checkpoint)
        # What is started inherits the core.
        os.sched_setaffinity(0, shared)
        with started(checkpoint, Path(directory), Mode(weights="int4")) as deployment:
            os.sched_setaffinity(0, other)
            if given.sidecar == "apart":
                for thread in sidecar_of(deployment)[0].threads():
                    os.sched_setaffinity(thread.id, other)
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
