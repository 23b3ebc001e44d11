# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 checkpoint``."""

from __future__ import annotations

from typing import Annotated

import typer

from kimi_k3.cli.groups import group
from kimi_k3.cli.options import AsJson, Checkpoint
from kimi_k3.errors import ExitCode
from kimi_k3.words.given import given_path

app = group("Look at a checkpoint, or make a tiny one.")


@app.command()
def make(
    directory: Annotated[str, typer.Argument(help="New directory, about 14 MB.")],
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights.")] = 0,
) -> None:
    """Write a tiny checkpoint with random weights in Kimi-K3's format."""
    from kimi_k3.checkpoint import make_tiny_checkpoint

    path = given_path("directory", directory)
    make_tiny_checkpoint(path, seed=seed)
    print(path)


@app.command()
def show(directory: Checkpoint, as_json: AsJson = False) -> int:
    """Show what a checkpoint holds and what is wrong with it; exit code 4 if it cannot be served."""
    from kimi_k3.checkpoint import inspect_checkpoint
    from kimi_k3.checkpoint.view import as_document, print_tables

    checkpoint = inspect_checkpoint(given_path("checkpoint", directory))
    if as_json:
        import json

        print(json.dumps(as_document(checkpoint), indent=1))
    else:
        print_tables(checkpoint)
    return ExitCode.BAD_CHECKPOINT if checkpoint.fatal else ExitCode.OK


@app.command()
def download(
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the Hugging Face hub.")],
    directory: Annotated[str, typer.Argument(help="Where to; 1.42 TiB.")],
    revision: Annotated[str, typer.Option(help="Commit, 40 hexadecimal digits.")],
) -> None:
    """Download what has not come yet of a checkpoint, and hold it against its index."""
    from kimi_k3.checkpoint.download import download_checkpoint

    download_checkpoint(repository, given_path("directory", directory), revision=revision, report=print)


@app.command()
def wait(
    directory: Checkpoint,
    revision: Annotated[
        str | None,
        typer.Option(help="Commit that `checkpoint download` brings. Default: any.", show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="<seconds>", help="Wait no longer.")] = 86400.0,
) -> None:
    """Wait until a checkpoint that is being downloaded can be served, and say how far it has come."""
    from kimi_k3.checkpoint.arrival import wait_for_checkpoint

    path = given_path("checkpoint", directory)
    wait_for_checkpoint(path, seconds=timeout, report=print, revision=revision)
