# SPDX-License-Identifier: Apache-2.0
"""The source of vLLM's releases, as in their wheels.

The tests' own vLLM is the build for CPUs; what runs on GPUs is another distribution, and of two versions.
Their Python files are taken from the package index, once per virtual environment.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

from kimi_k3.contract.record import contracts

VERSIONS = tuple(contract.version for contract in contracts())


@cache
def vllm_source(version: str) -> Path:
    """The ``vllm`` directory of a release, without its compiled parts. Its parent can be imported from."""
    kept = Path(sys.prefix) / "vllm-source" / version
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            _unpack(version, Path(scratch))
            (Path(scratch) / "python").rename(kept)
    return kept / "vllm"


def _unpack(version: str, scratch: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", str(scratch), f"vllm=={version}"], check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py") or ".dist-info/" in name:
                archive.extract(name, scratch / "python")
