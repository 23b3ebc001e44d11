# SPDX-License-Identifier: Apache-2.0
"""Seeded faults against the supervisor and the fake group: ``faults.py --seed N --cases N --processes N``."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kimi_k3.supervisor import health
from kimi_k3.words.phases import Phase

from .fault_case import ROUND, Case, Wrong


def cases_of(seed: int, count: int) -> list[tuple[str, Phase]]:
    """Fault and phase of each case."""
    chooser = random.Random(seed)
    chosen: list[tuple[str, Phase]] = []
    while len(chosen) < count:
        chosen += chooser.sample(ROUND, len(ROUND))
    return chosen[:count]


def _one(seed: int, number: int, fault: str, phase: Phase) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="kimi-k3-fault-"))
    case = Case(number, seed, fault, phase, directory)
    begun = time.monotonic()
    wrong, log = None, ""
    try:
        case.run()
    except Wrong as error:
        wrong = str(error)
    except Exception as error:
        wrong = f"defect of the case: {error!r}"
    if wrong is not None:
        with contextlib.suppress(OSError):
            log = (directory / "supervisor.log").read_text()[-1500:]
    shutil.rmtree(directory, ignore_errors=True)
    return {
        "number": number,
        "fault": fault,
        "phase": str(phase),
        "attentive": case.attentive,
        "seconds": round(time.monotonic() - begun, 2),
        "wrong": wrong,
        "log": log,
    }


def run(seed: int, count: int, processes: int) -> list[dict[str, Any]]:
    """All cases, ``processes`` at a time; their results in the order of their numbers."""
    health.INTERVAL_SECONDS = 0.1
    cases = [(seed, number, fault, phase) for number, (fault, phase) in enumerate(cases_of(seed, count))]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.starmap(_one, cases, chunksize=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--cases", type=int, default=4 * len(ROUND))
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="every case")
    given = parser.parse_args()
    results = run(given.seed, given.cases, given.processes)
    if given.json:
        print(json.dumps(results))
    else:
        wrong = [result for result in results if result["wrong"]]
        print(*(json.dumps(result) for result in wrong), sep="\n", end="\n" if wrong else "")
        print(f"seed {given.seed}: {len(results)} faults, {len(wrong)} wrong")
        sys.exit(1 if wrong else 0)
