# SPDX-License-Identifier: Apache-2.0
"""What a profile needs of one build of AITER, and where it is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kimi_k3.checkpoint import TextConfig
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.kernels.entry import TABLE
from kimi_k3.kernels.installed import Aiter, find_aiter
from kimi_k3.kernels.shapes import ARCHITECTURE, moe_shapes, require_int4_on_gfx942
from kimi_k3.kernels.table import REDUCED, Row, kernel_rows, read_tuned
from kimi_k3.kernels.transcript import Sizes
from kimi_k3.profiles.schema import Profile
from kimi_k3.words.given import given_path
from kimi_k3.words.gpus import Gpu
from kimi_k3.words.text import printable

PROBE = "-probe"
MASKED_REDUCTION = "moe_reduce (masked)"
"""The sum over a token's experts where other ranks hold some: no generation of AITER's entry compiles it."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Kernels of a profile for one build of AITER.

    Attributes:
        profile: its name.
        aiter: the build.
        gpu: what they are for.
        rows: of the table.
        directory: of this build's compiled kernels.
        notes: what an operator should know, a line each.
    """

    profile: str
    aiter: Aiter
    gpu: Gpu
    rows: tuple[Row, ...]
    directory: Path
    notes: tuple[str, ...]

    @property
    def kernels(self) -> dict[tuple[str, Sizes], list[int]]:
        """Numbers of tokens by kernel and shape, in the table's order."""
        found: dict[tuple[str, Sizes], list[int]] = {}
        for row in self.rows:
            for kernel in row.kernels:
                found.setdefault((kernel, sizes_of(row)), []).append(row.tokens)
        return found

    @property
    def jobs(self) -> int:
        """How many kernels the rows name, each row's counted."""
        return sum(len(row.kernels) for row in self.rows)

    @property
    def masked_reductions(self) -> dict[Sizes, list[int]]:
        """Numbers of tokens, by shape, of the rows that need the masked reduction."""
        found: dict[Sizes, list[int]] = {}
        for row in self.rows:
            if row.shape.masked and any(kernel.endswith(REDUCED) for kernel in row.kernels):
                found.setdefault(sizes_of(row), []).append(row.tokens)
        return found


def sizes_of(row: Row) -> Sizes:
    """The sizes by which AITER's entry names a shape."""
    shape = row.shape
    return shape.model_dim, shape.inter_dim, shape.experts, shape.topk


def kernels_wanted(
    text: TextConfig, profile: Profile, aiter: Aiter, environment: Mapping[str, str], *, cache: Path
) -> Wanted:
    """What ``profile`` needs.

    Args:
        text: the checkpoint's decoder.
        profile: the deployment.
        aiter: the installed build.
        environment: that a start would inherit; it may name another tuned table than the shipped one.
        cache: below which each build has its directory.

    Raises:
        OperatorError: the profile has no such kernels, or a table cannot be read.
    """
    gpu = require_int4_on_gfx942(profile)
    shapes = moe_shapes(text, profile)
    masked = any(shape.masked for shape in shapes)
    one_less = masked and aiter.looks_up_one_less
    paths = _tuned_tables(aiter, environment)
    tuned = read_tuned(paths)
    rows = tuple(kernel_rows(shapes, gpu, tuned.rows, one_less=one_less))
    wanted = Wanted(
        profile=profile.name,
        aiter=aiter,
        gpu=gpu,
        rows=rows,
        directory=cache / aiter.directory_name(gpu.architecture),
        notes=(),
    )
    notes = (*_notes(wanted, paths, one_less=one_less), *tuned.ragged)
    return replace(wanted, notes=notes)


def default_cache(environment: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/kimi-k3/kernels``, else ``~/.cache/kimi-k3/kernels``.

    Raises:
        OperatorError: neither is known.
    """
    if base := environment.get("XDG_CACHE_HOME"):
        return given_path("environment variable XDG_CACHE_HOME", base, absolute=True) / "kimi-k3" / "kernels"
    try:
        return Path.home() / ".cache" / "kimi-k3" / "kernels"
    except RuntimeError:
        raise OperatorError(
            f"user {os.getuid()} has no home directory to keep kernels in",
            remedy="give --cache-dir",
            exit_code=ExitCode.USAGE,
        ) from None


def probe_directory(environment: Mapping[str, str], search: Sequence[str] | None = None) -> Path:
    """Where starts keep what their probe compiled; apart from what ``kernels build`` did, which is more.

    Raises:
        OperatorError: there is no AITER, or no place.
    """
    name = find_aiter(search).directory_name(ARCHITECTURE)
    return default_cache(environment) / f"{name}{PROBE}"


def built_directory(environment: Mapping[str, str], search: Sequence[str] | None = None) -> Path | None:
    """Where ``kernels build`` compiled for the installed AITER, in the usual place; ``None`` if nowhere."""
    try:
        directory = default_cache(environment) / find_aiter(search).directory_name(ARCHITECTURE)
    except OperatorError:
        return None
    return directory if any(directory.rglob("*.pkl")) else None


def _tuned_tables(aiter: Aiter, environment: Mapping[str, str]) -> list[Path]:
    """Where AITER will look rows up while serving."""
    if given := environment.get(TABLE):
        # AITER, too, leaves out those of several that are not there; a single one must be.
        several = [Path(each) for each in given.split(os.pathsep) if each]
        return several if len(several) == 1 else [path for path in several if path.exists()]
    return [aiter.shipped_table] if aiter.shipped_table.is_file() else []


def _notes(wanted: Wanted, paths: list[Path], *, one_less: bool) -> Iterator[str]:
    count = sum(row.tuned for row in wanted.rows)
    where = " and ".join(printable(str(path)) for path in paths) or "no table: this AITER ships none for int4"
    yield (
        f"{count} of {len(wanted.rows)} rows have tuned kernels (from {where}), "
        f"{len(wanted.rows) - count} those of AITER's untuned fallback"
    )
    if one_less:
        topk = wanted.rows[0].shape.topk
        yield (
            f"this AITER looks shapes up for {topk - 1} experts per token and launches with {topk} (expert "
            f"parallelism, ROCm/aiter#5595); the table has the kernels of the former with the latter"
        )
    if (bundled := wanted.aiter.bundled_cache).is_dir():
        yield printable(
            f"a start that uses {wanted.directory} does not see the kernels that came with AITER; once: "
            f"cp -an {bundled}/. {wanted.directory}/"
        )
    if wanted.masked_reductions:
        yield (
            f"{MASKED_REDUCTION} belongs to kernels that end in {REDUCED}: AITER's entry does not compile "
            "it, so the first start does"
        )
