# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 checkpoint``."""

from __future__ import annotations

from typing import Annotated

import typer

from kimi_k3.cli.options import AsJson, Checkpoint
from kimi_k3.errors import ExitCode
from kimi_k3.words.given import given_path

app = typer.Typer(help="Look at a checkpoint, or make a tiny one.", rich_markup_mode=None)


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
