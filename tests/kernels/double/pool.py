# SPDX-License-Identifier: Apache-2.0
"""In the place of aiter/aot/flydsl/common.py: a process per job, results in files, retries after a crash."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Job = dict[str, Any]

_ARCHITECTURES = {80: "gfx942", 304: "gfx942", 256: "gfx950"}


def cu_num_to_arch(cu_num: int, default: str = "gfx950") -> str:
    """Unknown numbers are taken for gfx950."""
    return _ARCHITECTURES.get(cu_num, default)


def dedupe_jobs(jobs: list[Job]) -> list[Job]:
    """Equal jobs once."""
    return list({tuple(sorted(job.items())): job for job in jobs}.values())


@contextmanager
def compile_only_env(arch: str) -> Iterator[None]:
    """For the time of a job."""
    os.environ.update(COMPILE_ONLY="1", FLYDSL_GPU_ARCH=arch)
    yield
    del os.environ["COMPILE_ONLY"]


def run_jobs_parallel(worker: Callable[..., Job], jobs: list[Job]) -> list[Job]:
    """Run all jobs; one that crashed too often has no time."""
    if not jobs:
        return []
    workers = min(int(os.environ["AITER_FLYDSL_AOT_WORKERS"]), len(jobs))
    retries = int(os.environ.get("AITER_FLYDSL_AOT_MAX_RETRIES", "2"))
    print(f"[aiter] FlyDSL AOT: {len(jobs)} kernels, {workers} worker processes", flush=True)
    context = multiprocessing.get_context("fork")
    results: list[Job] = [{"kernel_name": job["kernel_name"], "compile_time": None} for job in jobs]
    attempts, queue, done = [0] * len(jobs), list(range(len(jobs)))[::-1], 0
    with tempfile.TemporaryDirectory(prefix="aot_results_") as directory:
        running: dict[int, Any] = {}
        while queue or running:
            while queue and len(running) < workers:
                index = queue.pop()
                out = Path(directory, f"k{index}.json")
                running[index] = context.Process(target=_run_one, args=(worker, jobs[index], str(out)))
                running[index].start()
            index, process = next(iter(running.items()))
            process.join()
            del running[index]
            if process.exitcode != 0 and attempts[index] < retries:
                attempts[index] += 1
                queue.append(index)
                print(
                    f"[aiter] FlyDSL {jobs[index]['kernel_name']} worker crashed "
                    f"(exitcode={process.exitcode}); retry {attempts[index]}/{retries}",
                    flush=True,
                )
                continue
            if process.exitcode == 0:
                results[index] = json.loads(Path(directory, f"k{index}.json").read_text())
            done += 1
            if done % max(1, len(jobs) // 20) == 0 or done == len(jobs):
                print(f"  ... {done}/{len(jobs)} kernels done", flush=True)
    return results


def _run_one(worker: Callable[..., Job], job: Job, out: str) -> None:
    Path(out).write_text(json.dumps(worker(**job)))
