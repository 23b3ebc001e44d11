# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 kernels build`` and ``kernels check``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_k3.checkpoint import read_config
from kimi_k3.checkpoint.published import published_config
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.files import read_small
from kimi_k3.kernels.build import build
from kimi_k3.kernels.check import check
from kimi_k3.kernels.installed import find_aiter
from kimi_k3.kernels.shapes import ARCHITECTURE, require_int4_on_gfx942
from kimi_k3.kernels.table import MAX_TABLE_BYTES, as_csv, write_table
from kimi_k3.kernels.view import print_build, print_check, progress
from kimi_k3.kernels.wanted import Wanted, default_cache, kernels_wanted
from kimi_k3.profiles.load import load_profile
from kimi_k3.words.text import printable

CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line of one build or check.

    Attributes:
        checkpoint: a directory with a ``config.json``, for the model's sizes; ``None`` for Kimi-K3's.
        profile: its name.
        arch: what to compile for.
        cache: below which each build of AITER has its directory; ``None`` for the usual place.
        as_json: whether to print the document and nothing else.
    """

    checkpoint: Path | None
    profile: str
    arch: str
    cache: Path | None
    as_json: bool


def run_build(
    request: Request,
    *,
    csv_only: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    search: Sequence[str] | None = None,
) -> int:
    """Compile and print a report; with ``csv_only`` only write the table there.

    Returns:
        0 if everything was compiled, 1 if something was not.

    Raises:
        OperatorError: usage, or it is not possible here; nothing was compiled.
    """
    wanted = _wanted(request, environment, search)
    if csv_only is not None:
        _write_only(csv_only, wanted)
        return ExitCode.OK
    with progress("compiling") as tell:
        report, failures = build(wanted, environment, tell=tell, search=search)
    if request.as_json:
        print(report.model_dump_json(indent=1))
    else:
        print_build(report, failures)
    return report.exit_code


def run_check(
    request: Request,
    *,
    environment: Mapping[str, str] = os.environ,
    search: Sequence[str] | None = None,
) -> int:
    """Print what is there.

    Returns:
        0 if everything is present, 1 if something is missing or unknown.

    Raises:
        OperatorError: usage, or it is not possible here.
    """
    wanted = _wanted(request, environment, search)
    with progress("looking") as tell:
        report = check(wanted, environment, tell=tell, search=search)
    if request.as_json:
        print(report.model_dump_json(indent=1))
    else:
        print_check(report)
    return report.exit_code


def _wanted(request: Request, environment: Mapping[str, str], search: Sequence[str] | None) -> Wanted:
    if request.arch != ARCHITECTURE:
        raise OperatorError(
            f"--arch {request.arch!r}: kernels are compiled ahead for {ARCHITECTURE} only",
            remedy=f"give --arch {ARCHITECTURE}",
            exit_code=ExitCode.USAGE,
        )
    profile = load_profile(request.profile)
    require_int4_on_gfx942(profile)
    directory = request.checkpoint
    config = published_config() if directory is None else read_config(directory / CONFIG)
    return kernels_wanted(
        config.text_config,
        profile,
        find_aiter(search),
        environment,
        cache=default_cache(environment) if request.cache is None else request.cache,
    )


def _write_only(path: Path, wanted: Wanted) -> None:
    """Write the table, but over nothing that is another's."""
    text = as_csv(wanted.rows)
    try:
        old = read_small(path, limit=MAX_TABLE_BYTES)
    except FileNotFoundError:
        old = None
    except OSError as error:
        raise _no_place(path, error.strerror or str(error)) from None
    if old is not None and old != text.encode():
        raise _no_place(path, "is there already, with something else in it")
    write_table(path, wanted.rows)
    for note in wanted.notes:
        print(f"note    {note}")
    print(printable(f"{len(wanted.rows)} rows in {path}"))


def _no_place(path: Path, why: str) -> OperatorError:
    return OperatorError(
        printable(f"--csv-only {path}: {why}"),
        remedy="name another file, or remove that one",
        exit_code=ExitCode.USAGE,
    )
