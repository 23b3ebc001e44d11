# SPDX-License-Identifier: Apache-2.0
"""In the place of flydsl/compiler/jit_function.py: a cache on disk in the layout of 0.4 or of 0.5.

What becomes of a kernel is told by behaviour.json beside AITER's package: fail, abort, or hang, each a list
of parts of kernels' names.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import aiter
import flydsl


def launch(function: str, name: str, artifact: dict[str, Any], closure: dict[str, Any]) -> None:
    """Find a compiled kernel, or compile it: what FlyDSL does under COMPILE_ONLY=1."""
    root = Path(os.environ["FLYDSL_RUNTIME_CACHE_DIR"])
    target = os.environ["FLYDSL_GPU_ARCH"]
    if flydsl.__version__.startswith("0.4"):
        # Keyed before tracing, by all that the source could depend on.
        manager = _hash({**artifact, **closure, "flydsl": flydsl.__version__})[:32]
        file = root / f"{function}_{manager}" / f"{_hash({'target': target})[:16]}.pkl"
        miss = (
            f"manager_key={manager}, cache_key=..., cache_dir={file.parent} (exists={file.parent.exists()})"
        )
    else:
        # Keyed by the traced code.
        file = root / function / f"{_hash({**artifact, 'target': target})}.pkl"
        miss = (
            f"no artifact {file.stem} in {file.parent}. Run-only traces current Python code but never lowers"
        )
    if file.exists():
        return
    # Older versions do not know the variable.
    if os.environ.get("FLYDSL_RUNTIME_RUN_ONLY") == "1" and not flydsl.__version__.startswith("0.2"):
        raise RuntimeError(f"FLYDSL_RUNTIME_RUN_ONLY=1 but no usable AOT cache for {function}: {miss}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".lock").touch()
    temporary = file.parent / f".{file.name}.{os.getpid()}.tmp"
    temporary.write_text("half")
    _behave(name)
    temporary.write_text(json.dumps([function, name, artifact, closure, target]))
    temporary.replace(file)


def _behave(name: str) -> None:
    told = json.loads((Path(aiter.__file__).parent.parent / "behaviour.json").read_text())

    def told_to(what: str) -> bool:
        return any(part in name for part in told.get(what, ()))

    if told_to("abort"):
        print("LLVM ERROR: Cannot select: v2bf16,ch = BUFFER_ATOMIC_FADD", file=sys.stderr, flush=True)
        os.abort()
    if told_to("hang"):
        Path(told["hanging"]).touch()
        time.sleep(600)
    if told_to("fail"):
        raise RuntimeError(f"failed to legalize operation in {name}")


def _hash(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
