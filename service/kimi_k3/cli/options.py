# SPDX-License-Identifier: Apache-2.0
"""Arguments and options that several commands have, each declared once.

Paths are text to the parser: it would take an empty one for the current directory.
"""

from __future__ import annotations

from typing import Annotated

import typer

_CHECKPOINT = typer.Argument(help="Directory with config.json and the shards.")
_WEIGHTS = typer.Option(help="Routed experts as int4 (lossy) or mxfp4.")
_RULE = typer.Option(help="Scales of int4 by mse or amax.")

Checkpoint = Annotated[str, _CHECKPOINT]
CheckpointIfAny = Annotated[str | None, _CHECKPOINT]
CheckpointConfig = Annotated[str, typer.Argument(help="Directory with config.json; nothing else is needed.")]
StateDir = Annotated[
    str | None,
    typer.Option(
        metavar="<path>",
        help="Directory of the journal. Default: $KIMI_K3_STATE_DIR, else ~/.local/state/kimi-k3.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]

CaFile = Annotated[
    str | None,
    typer.Option(
        metavar="<path>",
        help="Authorities that certificates are checked by (PEM). Default: the system's.",
        show_default=False,
    ),
]

Weights = Annotated[str, _WEIGHTS]
WeightsIfAny = Annotated[str | None, _WEIGHTS]
AcceptLossy = Annotated[
    bool, typer.Option("--accept-lossy", help="Consent to int4. Also: KIMI_K3_ACCEPT_LOSSY=1.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="name=value", help="Change the profile, e.g. max-model-len=65536."),
]
TensorParallelSize = Annotated[int | None, typer.Option(help="Ranks, up to 1024. Default: the profile's.")]
NodeRank = Annotated[
    int | None, typer.Option(help="Which node this is, of a profile for several; 0 serves the API.")
]
LeaderAddress = Annotated[
    str | None,
    typer.Option(metavar="<host>", help="Where all nodes reach node 0, which also says it to itself."),
]
LeaderPort = Annotated[
    int | None,
    typer.Option(
        help="Port of node 0 at which the ranks find each other. Default: 29501.", show_default=False
    ),
]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens of prompt and answer.")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Requests at a time, at most 65536.")]

Rule = Annotated[str, _RULE]
RuleIfAny = Annotated[str | None, _RULE]
NegativeScale = Annotated[
    bool,
    typer.Option(
        "--negative-scale/--no-negative-scale", help="Whether rule mse may choose negative scales, too."
    ),
]
AllowNonfinite = Annotated[
    bool,
    typer.Option(
        "--allow-nonfinite",
        help="Count groups with NaN or infinite values, which stay so, instead of stopping at them.",
    ),
]

# Of the commands of ``kimi-k3 kernels``.
ModelSizes = Annotated[
    str | None,
    typer.Argument(
        help="Directory with config.json, for its sizes. Default: Kimi-K3's as published.", show_default=False
    ),
]
Int4Profile = Annotated[str, typer.Option(help="Named deployment with int4 on gfx942.")]
Arch = Annotated[str, typer.Option(help="What to compile for: gfx942.")]
CacheDir = Annotated[
    str | None,
    typer.Option(
        metavar="<path>",
        help="Below it each build of AITER has a directory. Default: ~/.cache/kimi-k3/kernels.",
        show_default=False,
    ),
]
ReportAsJson = Annotated[bool, typer.Option("--json", help="The report as JSON.")]
