# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 verify``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kimi_k3.cli.options import CaFile, WeightsIfAny
from kimi_k3.words.addresses import ENGINE_PORT, HOST, SIDECAR_PORT
from kimi_k3.words.given import given_path

app = typer.Typer(help="Ask a live deployment whether it serves what it should.", rich_markup_mode=None)


@app.callback()
def verify() -> None:
    """Ask a live deployment whether it serves what it should."""


@app.command()
def smoke(
    engine: Annotated[str, typer.Option(help="URL of the API.")] = f"http://{HOST}:{ENGINE_PORT}",
    sidecar: Annotated[str, typer.Option(help="URL of the sidecar.")] = f"http://{HOST}:{SIDECAR_PORT}",
    metrics: Annotated[
        str | None,
        typer.Option(help="URL of vLLM's metrics. Default: /metrics of the API.", show_default=False),
    ] = None,
    weights: WeightsIfAny = None,
    api_key_file: Annotated[
        str | None,
        typer.Option(metavar="<path>", help="File with the API key. Also: KIMI_K3_API_KEY."),
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
    """Ask for one completion, both scrapes and the consent; a line for each.

    The exit code is 0 if all is as it should be, else 1.
    """
    from kimi_k3.plan.options import choose
    from kimi_k3.plan.secret import read_api_key
    from kimi_k3.verify.smoke import Target, run_smoke
    from kimi_k3.words.sidecar import read_token, sidecar_url
    from kimi_k3.words.weights import Weights

    base = sidecar_url(engine)
    return run_smoke(
        Target(
            engine=base,
            sidecar=sidecar_url(sidecar),
            metrics=f"{base}/metrics" if metrics is None else sidecar_url(metrics),
            weights=None if weights is None else choose("--weights", weights, Weights),
            api_key=read_api_key(
                None if api_key_file is None else given_path("--api-key-file", api_key_file), os.environ
            ),
            token=read_token(
                None if token_file is None else given_path("--token-file", token_file), os.environ
            ),
            authorities=None if ca_file is None else given_path("--ca-file", ca_file),
        ),
        report=print,
    )
