# SPDX-License-Identifier: Apache-2.0
"""In the place of aiter/aot/flydsl/moe.py, as its first two generations are: a job for each kernel."""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from typing import Any

from aiter.aot.flydsl.common import compile_only_env, cu_num_to_arch, dedupe_jobs, run_jobs_parallel
from aiter.jit.core import tuned_file
from aiter.ops.flydsl.moe_kernels import get_flydsl_kernel_params, launch_stage

DEFAULT_CSVS = [tuned_file()]


def parse_csv(path: str) -> list[dict[str, Any]]:
    """Longer rows are no trouble here: a DictReader puts the rest aside."""
    jobs = []
    with open(path, newline="") as file:  # noqa: PTH123
        for row in csv.DictReader(file):
            job: dict[str, Any] = {
                "token_num": int(row["token"]),
                "model_dim": int(row["model_dim"]),
                "inter_dim": int(row["inter_dim"]),
                "experts": int(row["expert"]),
                "topk": int(row["topk"]),
                "doweight_stage1": bool(int(row.get("doweight_stage1", "0"))),
                "cu_num": int(row.get("cu_num", "0")),
                "block_m": int(row.get("block_m", "0") or "0"),
                "act": row.get("act_type", "").strip().split(".")[-1].lower(),
            }
            for column in ("kernelName1", "kernelName2"):
                name = row.get(column, "").strip()
                if not name.startswith("flydsl_"):
                    continue
                params = get_flydsl_kernel_params(name)
                if params is None:
                    print(f"  [WARN] Unknown kernel name: {name}, skipping")
                    continue
                jobs.append({**job, "kernel_name": name, **params})
    unique: list[dict[str, Any]] = dedupe_jobs(jobs)
    return unique


def compile_one_config(**job: Any) -> dict[str, Any]:
    """Failures are printed, never raised."""
    arch = cu_num_to_arch(job["cu_num"])
    shape = (
        f"{job['kernel_name']}  model_dim={job['model_dim']} "
        f"inter_dim={job['inter_dim']} E={job['experts']} topk={job['topk']}"
    )
    result = {"kernel_name": job["kernel_name"], "shape": shape, "compile_time": None, "compile_arch": arch}
    begin = time.time()
    try:
        assert job["act"] == "situv2", job["act"]
        with compile_only_env(arch):
            sizes = {name: job[name] for name in ("model_dim", "inter_dim", "experts", "topk")}
            launch_stage(job["kernel_name"], **sizes)
        return {**result, "compile_time": time.time() - begin}
    except Exception as error:
        print(f"  [FAIL] compile  {shape}  arch={arch}: {error}")
    return result


def main() -> None:
    """Of the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", nargs="+", default=DEFAULT_CSVS)
    paths = [os.path.abspath(path) for path in parser.parse_args().csv]  # noqa: PTH100
    for path in paths:
        if not os.path.isfile(path):  # noqa: PTH113
            print(f"Error: CSV file not found: {path}")
            sys.exit(1)
    jobs = [job for path in paths for job in parse_csv(path)]
    print(f"  Total jobs:     {len(jobs)}")
    results = run_jobs_parallel(compile_one_config, jobs)
    failed = sum(result["compile_time"] is None for result in results)
    print(f"  Compiled:     {len(results) - failed} ok, {failed} failed")
    if failed:
        print("Some compilations failed. Check output above for details.")
        sys.exit(1)
    print("All compilations succeeded. Cache is ready.")


if __name__ == "__main__":
    main()
