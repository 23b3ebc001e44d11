# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 watch``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kimi_k3.cli.options import CaFile
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.addresses import HOST, SIDECAR_PORT
from kimi_k3.words.given import given_path


def watch(
    url: Annotated[str, typer.Argument(help="Where the sidecar is.")] = f"http://{HOST}:{SIDECAR_PORT}",
    once: Annotated[bool, typer.Option("--once", help="Print the picture once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="End when it is ready or has ended.")] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="<seconds>", help="Wait no longer. Only with --wait.")
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option(
            metavar="<path>",
            help="File with the sidecar's token. Default: $KIMI_K3_SIDECAR_TOKEN_FILE.",
            show_default=False,
        ),
    ] = None,
    ca_file: CaFile = None,
) -> int:
    """Show a deployment's phases, ranks, conversion, memory and warnings, live until Ctrl-C.

    The exit code is 0 if it is ready, 10 if not yet, 11 if it has ended or failed, 12 if the sidecar does not
    answer.
    """
    from kimi_k3.watch.command import Request, run_watch
    from kimi_k3.words.sidecar import read_token, sidecar_url

    if timeout is not None and not (wait and 0 <= timeout <= 7 * 24 * 3600):
        raise OperatorError(
            f"--timeout {timeout:g}: only with --wait, and from 0 s to 7 days",
            remedy="correct it or leave it out",
            exit_code=ExitCode.USAGE,
        )
    if once and wait:
        raise OperatorError(
            "--once: not with --wait, which ends by itself",
            remedy="leave one of them out; --json goes with both",
            exit_code=ExitCode.USAGE,
        )
    file = None if token_file is None else given_path("--token-file", token_file)
    return run_watch(
        Request(
            url=sidecar_url(url),
            token=read_token(file, os.environ),
            once=once,
            as_json=as_json,
            wait=wait,
            timeout_seconds=timeout,
            authorities=None if ca_file is None else given_path("--ca-file", ca_file),
        )
    )
