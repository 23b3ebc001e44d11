# SPDX-License-Identifier: Apache-2.0
"""In the place of aiter/aot/flydsl/moe.py, as its third generation is: rows are replayed.

The kernels are those that the runtime finds in the table, which it reads as strictly as pandas does.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from typing import Any

from aiter.aot.flydsl.common import compile_only_env, cu_num_to_arch, dedupe_jobs, run_jobs_parallel
from aiter.jit.core import read_strictly, tuned_file
from aiter.ops.flydsl.moe_kernels import launch_stage

DEFAULT_CSVS = [tuned_file()]
FIELDS = (
    "gfx", "cu_num", "token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype", "q_dtype_a",
    "q_dtype_w", "q_type", "use_g1u1", "doweight_stage1", "kernelName1", "kernelName2",
)  # fmt: skip
KEY = FIELDS[:14]


def parse_csv(path: str, edges: bool = True) -> list[dict[str, Any]]:
    """A job for each row, bounds of the activation, and end of its range of tokens."""
    jobs = []
    with open(path, newline="") as file:  # noqa: PTH123
        for row in csv.DictReader(file):
            shape = {name: (row.get(name) or "").strip() for name in FIELDS}
            if not any(shape[name].startswith("flydsl_") for name in ("kernelName1", "kernelName2")):
                continue
            token = int(shape["token"])
            for index, beta in enumerate((None, 1.0, 4.0)):
                for m in [token // 2 + 1, token] if edges and token > 1 else [token]:
                    name = f"{shape['kernelName1'] or '-'} | {shape['kernelName2'] or '-'}"
                    variant = {"beta": beta, "m": m, "primary": index == 0, "csv_path": path}
                    jobs.append({**shape, **variant, "kernel_name": name})
    unique: list[dict[str, Any]] = dedupe_jobs(jobs)
    return unique


def job_arch(job: dict[str, Any]) -> str:
    """The table's column first."""
    return str(job["gfx"] or cu_num_to_arch(int(job["cu_num"])))


def compile_one_config(**job: Any) -> dict[str, Any]:
    """Failures are printed, never raised."""
    arch = job_arch(job)
    beta = "" if job["beta"] is None else f" beta={job['beta']:g}/25"
    shape = (
        f"{job['kernel_name']}  token={job['token']} m={job['m']} "
        f"dims=({job['model_dim']},{job['inter_dim']}) "
        f"E={job['expert']} topk={job['topk']} gate=separated{beta}"
    )
    result = {"kernel_name": job["kernel_name"], "shape": shape, "compile_time": None, "compile_arch": arch}
    begin = time.time()
    try:
        with compile_only_env(arch):
            _replay(job)
        return {**result, "compile_time": time.time() - begin}
    except Exception as error:
        print(f"  [FAIL] {shape}  arch={arch}: {type(error).__name__}: {error}", flush=True)
    return result


def _replay(job: dict[str, Any]) -> None:
    assert job["q_dtype_w"] == "torch.int4", job
    found = {tuple(row[name] for name in KEY): row for row in read_strictly(job["csv_path"])}
    row = found[tuple(job[name] for name in KEY)]
    sizes = {name: int(job[name]) for name in ("model_dim", "inter_dim", "topk")}
    for column in ("kernelName1", "kernelName2"):
        launch_stage(row[column], experts=int(job["expert"]), **sizes)


def _replay_arch(jobs: list[dict[str, Any]], arch: str) -> int:
    if os.environ.get("GPU_ARCHS") != arch:
        raise RuntimeError(f"replaying {arch} jobs needs GPU_ARCHS={arch} set before aiter is imported")
    results = run_jobs_parallel(compile_one_config, jobs)
    failed = sum(result["compile_time"] is None for result in results)
    print(
        f"[aiter] FlyDSL MoE replay {arch}: {len(results) - failed} ok, {failed} failed, "
        "0 unsupported caller-side variants",
        flush=True,
    )
    return failed


def main() -> None:
    """Of the module, which starts itself again for each architecture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", nargs="+", default=DEFAULT_CSVS)
    parser.add_argument("--row-tokens-only", action="store_true")
    parser.add_argument(
        "--check",
        action="store_true",
    )
    parser.add_argument("--arch")
    args = parser.parse_args()
    if args.check:
        os.environ["FLYDSL_RUNTIME_RUN_ONLY"] = "1"
    jobs = [job for path in args.csv for job in parse_csv(path, not args.row_tokens_only)]
    if args.arch:
        sys.exit(1 if _replay_arch([job for job in jobs if job_arch(job) == args.arch], args.arch) else 0)
    archs = sorted({job_arch(job) for job in jobs})
    print(f"[aiter] FlyDSL MoE replay: {len(jobs)} jobs, archs {', '.join(archs) or '-'}", flush=True)
    failed = 0
    for arch in archs:
        command = [sys.executable, "-m", "aiter.aot.flydsl.moe", "--arch", arch, "--csv", *args.csv]
        command += ["--check"] if args.check else []
        command += ["--row-tokens-only"] if args.row_tokens_only else []
        hidden = dict.fromkeys(("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), "-1")
        failed += subprocess.run(command, env={**os.environ, **hidden, "GPU_ARCHS": arch}).returncode != 0
    if failed:
        print("Some replays failed. Check output above for details.")
        sys.exit(1)
    print("All replays succeeded. Cache is ready.")


if __name__ == "__main__":
    main()
