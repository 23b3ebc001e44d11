# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 kernels``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kimi_k3.cli.groups import group
from kimi_k3.cli.options import Arch, CacheDir, Int4Profile, ModelSizes, ReportAsJson
from kimi_k3.words.given import given_path

app = group("Compile a profile's kernels ahead of time, or tell which are missing.")


@app.command()
def build(
    checkpoint: ModelSizes = None,
    profile: Int4Profile = "ep8",
    arch: Arch = "gfx942",
    cache_dir: CacheDir = None,
    csv_only: Annotated[
        str | None,
        typer.Option(metavar="<path>", help="Only write the table of shapes and kernels there."),
    ] = None,
    as_json: ReportAsJson = False,
) -> int:
    """Compile the kernels that a profile needs, without a GPU; minutes to hours.

    The exit code is 0 if all were compiled, 1 if one was not, 2 for usage or if it is not possible here.
    """
    from kimi_k3.kernels.command import run_build

    return run_build(
        _request(checkpoint, profile, arch, cache_dir, as_json=as_json),
        csv_only=None if csv_only is None else given_path("--csv-only", csv_only, absolute=True),
    )


@app.command()
def check(
    checkpoint: ModelSizes = None,
    profile: Int4Profile = "ep8",
    arch: Arch = "gfx942",
    cache_dir: CacheDir = None,
    as_json: ReportAsJson = False,
) -> int:
    """Tell which kernels of a profile are compiled, without a GPU and without compiling.

    The exit code is 0 if all are, 1 if one is missing or cannot be told, 2 for usage or if it is not possible
    here.
    """
    from kimi_k3.kernels.command import run_check

    return run_check(_request(checkpoint, profile, arch, cache_dir, as_json=as_json))


def _request(checkpoint: str | None, profile: str, arch: str, cache_dir: str | None, *, as_json: bool) -> Any:
    from kimi_k3.kernels.command import Request

    return Request(
        checkpoint=None if checkpoint is None else given_path("checkpoint", checkpoint, absolute=True),
        profile=profile,
        arch=arch,
        cache=None if cache_dir is None else given_path("--cache-dir", cache_dir, absolute=True),
        as_json=as_json,
    )
