# SPDX-License-Identifier: Apache-2.0
"""What int4 costs: ``kimi-k3 convert-report`` and ``convert-file``."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from kimi_k3.cli.options import AllowNonfinite, Checkpoint, NegativeScale, Rule
from kimi_k3.errors import OperatorError
from kimi_k3.words.given import given_path


def convert_report(
    checkpoint: Checkpoint,
    layers: Annotated[
        str | None, typer.Option(help="Numbers from 0, e.g. 1-3,7. Default: all with experts.")
    ] = None,
    rule: Rule = "mse",
    negative_scale: NegativeScale = True,
    allow_nonfinite: AllowNonfinite = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="<path>", help="Write the report there, too.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Continue an unfinished one.")] = True,
) -> int:
    """Show what int4 would cost a checkpoint, layer by layer; reads every expert, starts no engine."""
    _require_numbers("convert-report")
    from kimi_k3.conversion.files.report import Request, run_report
    from kimi_k3.plan.options import requantisation

    return run_report(
        Request(
            checkpoint=given_path("checkpoint", checkpoint),
            layers=layers,
            requantisation=requantisation(
                "--rule", rule, negative_scale=negative_scale, allow_nonfinite=allow_nonfinite
            ),
            json_file=None if json_file is None else given_path("--json", json_file),
            resume=resume,
        )
    )


def convert_file(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="npz with mxfp4_packed [E,N,K/2] and e8m0 [E,N,K/32], uint8.")
    ],
    target: Annotated[
        str, typer.Argument(metavar="OUT", help="npz to write: packed, scale_bits, report (JSON).")
    ],
    rule: Rule,
    layout: Annotated[str, typer.Option(help="Order of the result: aiter (for its kernels) or plain.")],
    device: Annotated[str, typer.Option(help="cpu, or cuda (ROCm devices as well).")] = "cpu",
    negative_scale: NegativeScale = True,
    allow_nonfinite: AllowNonfinite = False,
) -> None:
    """Convert the experts in a file, to compare them with those of another implementation."""
    _require_numbers("convert-file")
    from kimi_k3.conversion.files.models import Device
    from kimi_k3.conversion.files.npz import convert_file as convert
    from kimi_k3.plan.options import choose, requantisation
    from kimi_k3.words.weights import Int4Layout

    convert(
        given_path("IN", source),
        given_path("OUT", target),
        requantisation=requantisation(
            "--rule", rule, negative_scale=negative_scale, allow_nonfinite=allow_nonfinite
        ),
        layout=choose("--layout", layout, Int4Layout),
        device=choose("--device", device, Device),
    )


def _require_numbers(command: str) -> None:
    """The commands of the conversion also run without an engine, which would have brought these along."""
    if missing := [name for name in ("numpy", "numba") if importlib.util.find_spec(name) is None]:
        what = " and ".join(missing)
        raise OperatorError(
            f"{command} needs {what}, not installed here", remedy=f"pip install {' '.join(missing)}"
        )
