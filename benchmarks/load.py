# SPDX-License-Identifier: Apache-2.0
"""The sidecar under load, on one core: errors, times of the probes, memory, and what it costs when idle.

``make load``, or ``.venv/bin/python -m benchmarks.load``, on an otherwise idle machine with two cores. The
sidecar has one of them to itself; the clients and the replayed start (96 layers on 8 ranks, whose journal
goes on changing) have the other. Requests are sent at fixed moments whether or not earlier ones are answered,
and their times count from those moments. Prints rows for RESULTS.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.replay.recording import Recording

from kimi_k3.words.environment import PREFIX

TIMEOUT_SECONDS = 5.0
SETTLE_SECONDS = 5.0
ANSWERS = (200, 503)
"""The probes say no by 503, which is an answer."""


@dataclass(frozen=True)
class Load:
    """What is asked, and for how long: requests a second, clients, seconds."""

    seconds: float
    idle_seconds: float
    status_rate: float
    status_connections: int
    streams: int
    probe_rate: float = 10.0
    scrape_rate: float = 1.0


@dataclass
class Result:
    """What came of the requests to one path: seconds each, and errors by what they are."""

    path: str
    rate: float
    seconds: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def row(self, duration: float) -> str:
        """A row of the table; times in milliseconds."""
        times = sorted(self.seconds)
        shown = [f"{1000 * percentile(times, share):.1f}" if times else "none" for share in (0.5, 0.99, 1.0)]
        failed = ", ".join(f"{count} {what}" for what, count in self.errors.most_common(3)) or "0"
        cells = [f"`{self.path}`", f"{self.rate:g}", f"{len(times) / duration:.1f}", *shown, failed]
        return f"| {' | '.join(cells)} |"


def percentile(ordered: list[float], share: float) -> float:
    """The value below which ``share`` of the ordered values lie."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Connection:
    """One connection that is kept open; opened anew after an error."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self, path: str) -> int:
        """Ask once and read the whole answer; returns the status.

        Raises:
            OSError, EOFError, ValueError: there was no answer, or none of HTTP.
        """
        reused = self._streams is not None
        try:
            return await self._ask(path)
        except (asyncio.IncompleteReadError, ConnectionResetError) as error:
            # A server may end a connection that was idle just as it is used again; every client asks anew.
            if not reused or (isinstance(error, asyncio.IncompleteReadError) and error.partial):
                raise
            return await self._ask(path)

    async def _ask(self, path: str) -> int:
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = self._streams
            writer.write(request(path))
            status, length, closes = await read_head(reader)
            await reader.readexactly(length)
        except BaseException:
            self.close()
            raise
        if closes:
            self.close()
        return status

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


def request(path: str) -> bytes:
    """A request as it is sent."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, int, bool]:
    """Status, length of the body, and whether the connection ends after it."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split(maxsplit=2)[1])
    _, _, length = head.partition(b"content-length:")
    closes = head.startswith(b"http/1.0") or b"connection: close" in head
    return status, int(length.split(maxsplit=1)[0]) if length else 0, closes


async def ask_at_rate(port: int, result: Result, connections: int, end: float) -> None:
    """Ask ``result.path`` at its rate until ``end``, over at most so many connections."""
    free: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()
    for _ in range(connections):
        free.put_nowait(Connection(port))

    async def one(due: float) -> None:
        # Waiting for a connection counts, too: else an overload would only shift the requests.
        loop_due = due - time.monotonic() + asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(loop_due + TIMEOUT_SECONDS):
                connection = await free.get()
                try:
                    status = await connection.get(result.path)
                finally:
                    free.put_nowait(connection)
        except (OSError, EOFError, ValueError) as error:
            result.errors[type(error).__name__] += 1
            return
        if status in ANSWERS:
            result.seconds.append(time.monotonic() - due)
        else:
            result.errors[f"HTTP {status}"] += 1

    due = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while due < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            result.late.append(time.monotonic() - due)
            group.create_task(one(due))
            due += 1 / result.rate
    while not free.empty():
        free.get_nowait().close()


async def listen(port: int, events: Counter[str], end: float) -> None:
    """One client of /events: counts what comes until ``end``; a stream that ends earlier is an error."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request("/events"))
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                while line := await reader.readline():
                    if line.startswith(b"event:"):
                        events[line[6:].strip().decode()] += 1
                events["ended early"] += 1
        finally:
            writer.close()
    except TimeoutError:
        events["clients"] += 1
    except (OSError, ValueError) as error:
        events[type(error).__name__] += 1


async def watched(
    loading: Awaitable[tuple[list[Result], Counter[str] | None]], process: psutil.Process, seconds: float
) -> tuple[list[Result], Counter[str] | None, int]:
    """What came of the load, and the process's resident bytes when a third of it was over."""

    async def resident() -> int:
        await asyncio.sleep(seconds / 3)
        return int(process.memory_info().rss)

    (results, events), warm = await asyncio.gather(loading, resident())
    return results, events, warm


async def put_load(port: int, load: Load) -> tuple[list[Result], Counter[str] | None]:
    """All of the load at once; the events are ``None`` where there are none."""
    events: Counter[str] | None = Counter() if has_events(port) and load.streams else None
    results = [Result(path, load.probe_rate) for path in ("/livez", "/startupz", "/readyz")]
    results.append(Result("/metrics", load.scrape_rate))
    results.append(Result("/status", load.status_rate))
    end = time.monotonic() + load.seconds
    async with asyncio.TaskGroup() as group:
        for _ in range(load.streams if events is not None else 0):
            assert events is not None
            group.create_task(listen(port, events, end))
        for one in results:
            connections = load.status_connections if one.path == "/status" else 1
            group.create_task(ask_at_rate(port, one, connections, end))
    return results, events


def has_events(port: int) -> bool:
    """Whether this sidecar has /events."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json", timeout=30) as answer:
            return "/events" in json.load(answer)["paths"]
    except urllib.error.URLError:
        return False


@contextlib.contextmanager
def pinned(core: int, *command: object) -> Iterator[psutil.Process]:
    """A Python process on one core, without settings of the shell; ended afterwards."""
    environment = {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}
    child = subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, "-m", *map(str, command)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield psutil.Process(child.pid)
    finally:
        child.terminate()
        child.wait()


def cpu_seconds(process: psutil.Process) -> float:
    """Processor time that a process has used; not by ticks, which miss who wakes for a moment."""
    return _schedule(process, 0)


def waited_seconds(process: psutil.Process) -> float:
    """How long the threads of a process were ready to run and another had their core."""
    return _schedule(process, 1)


def _schedule(process: psutil.Process, column: int) -> float:
    """Seconds, summed over the threads, of a column of their schedstat."""
    found = 0
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += int((task / "schedstat").read_text().split()[column])
    return found / 1e9


def wait_for(port: int) -> None:
    """Wait until the sidecar answers with a phase."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with (
            contextlib.suppress(OSError, ValueError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5) as answer,
        ):
            if json.load(answer)["phase"] is not None:
                return
        time.sleep(0.2)
    raise SystemExit("the sidecar has not answered within 60 s")


def measure(phase: str, load: Load, cores: list[int]) -> None:
    """Measure in one phase of the replayed start, and print it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.sched_setaffinity(0, {cores[1]})
    with (
        tempfile.TemporaryDirectory() as directory,
        pinned(cores[1], "tests.replay", directory, "--from", phase) as _,
        pinned(cores[0], "kimi_k3", "sidecar", "--state-dir", directory, "--port", port) as sidecar,
    ):
        wait_for(port)
        time.sleep(SETTLE_SECONDS)
        before, resident = cpu_seconds(sidecar), sidecar.memory_info().rss
        time.sleep(load.idle_seconds)
        idle = (cpu_seconds(sidecar) - before) / load.idle_seconds
        before, waited = cpu_seconds(sidecar), waited_seconds(sidecar)
        began = time.monotonic()
        results, events, warm = asyncio.run(watched(put_load(port, load), sidecar, load.seconds))
        busy = (cpu_seconds(sidecar) - before) / (time.monotonic() - began)
        waited = waited_seconds(sidecar) - waited
        end = sidecar.memory_info().rss
        threads = sidecar.num_threads()
    print(f"\nIn phase {phase}, {load.seconds:g} s, {load.streams if events is not None else 0} streams:\n")
    print("| path | asked/s | answered/s | p50 ms | p99 ms | most ms | errors |")
    print("|---|---|---|---|---|---|---|")
    for one in results:
        print(one.row(load.seconds))
    if events is None:
        print("\n/events: skipped, this sidecar has none.")
    else:
        print(f"\n/events: {dict(events)}")
    late = sorted(moment for one in results for moment in one.late)
    print(
        f"Sidecar: {idle:.1%} of a core without a client ({load.idle_seconds:g} s), {busy:.0%} under load; "
        f"resident {resident / 1e6:.1f} MB before, {warm / 1e6:.1f} MB after a third of it, "
        f"{end / 1e6:.1f} MB after; {threads} threads.\n"
        f"Ready to run but kept waiting by others on its core (or its own threads): {waited:.1f} s.\n"
        f"The clients themselves were late by {1000 * statistics.median(late):.1f} ms in the middle, "
        f"{1000 * percentile(late, 0.99):.1f} ms at p99.",
        flush=True,
    )


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--phase", action="append", choices=[str(one) for one in Recording.load().phases()])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=500.0, help="requests of /status in a second")
    parser.add_argument("--connections", type=int, default=64, help="for /status")
    parser.add_argument("--streams", type=int, default=100, help="clients of /events")
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("needs two cores: the clients would slow the sidecar that they measure")
    load = Load(
        seconds=given.seconds,
        idle_seconds=given.idle_seconds,
        status_rate=given.rate,
        status_connections=given.connections,
        streams=given.streams,
    )
    for phase in given.phase or ["converting", "ready"]:
        measure(phase, load, cores)


if __name__ == "__main__":
    main()
