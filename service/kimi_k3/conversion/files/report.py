# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 convert-report``: what int4 would cost a checkpoint, without an engine.

The routed experts are streamed from disk, some at a time, converted in memory and forgotten.
"""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kimi_k3.checkpoint import read_config, require_servable
from kimi_k3.checkpoint.messages import bad_checkpoint
from kimi_k3.conversion.candidates import rule_of
from kimi_k3.conversion.files.atomic import replacing, require_place
from kimi_k3.conversion.files.expert_files import ExpertFiles
from kimi_k3.conversion.files.models import (
    ProgressHeader,
    ProjectionReport,
    summarise,
    summarise_projection,
)
from kimi_k3.conversion.files.progress import ProgressFile, progress_path
from kimi_k3.conversion.files.view import print_report, ranges, watching
from kimi_k3.conversion.nonfinite import NonFiniteGroupError
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.text import printable
from kimi_k3.words.weights import Int4Layout, Projection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kimi_k3.conversion.candidates import Rule
    from kimi_k3.conversion.files.expert_files import Batch
    from kimi_k3.conversion.files.view import Watch
    from kimi_k3.conversion.loss import Loss
    from kimi_k3.words.weights import Requantisation


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line of one report.

    Attributes:
        checkpoint: its directory.
        layers: which ones, as ``1-3,7``; None for all that have experts.
        requantisation: what decides the figures, beside the checkpoint.
        json_file: where the report is written as JSON, besides being printed.
        resume: whether to continue what an earlier run has begun.
    """

    checkpoint: Path
    layers: str | None
    requantisation: Requantisation
    json_file: Path | None
    resume: bool


def run_report(request: Request) -> int:
    """Make the report, print it, write its JSON; returns the exit code.

    Raises:
        OperatorError: the checkpoint lacks or damages something the report needs, a group is not finite, or
            progress or report cannot be written.
    """
    if request.json_file is not None:
        require_place("--json", request.json_file, written_by="convert-report", is_ours=_is_report)
    files = open_experts(request.checkpoint, request.layers)
    header = ProgressHeader(
        directory=printable(str(request.checkpoint.resolve())),
        checkpoint=files.identity,
        requantisation=request.requantisation,
    )
    progress = ProgressFile(
        progress_path(request.json_file, header),
        header,
        resume=request.resume,
        shards_of=files.shards_of,
        notice=_say,
    )
    with contextlib.closing(progress):
        try:
            parts = _measure(request, files, progress)
        except KeyboardInterrupt:
            _say(f"interrupted; run the same command again to continue from {progress.path}")
            return ExitCode.INTERRUPTED
        report = summarise(files.identity, request.requantisation, parts)
        if request.json_file is None:
            # Its only copy: if it cannot be printed, the next run has only to print.
            print_report(request.checkpoint, report)
            _end(progress, parts)
        else:
            with replacing(request.json_file) as stream:
                stream.write(report.model_dump_json(indent=1).encode() + b"\n")
            _end(progress, parts)
            print_report(request.checkpoint, report)
    return ExitCode.OK


def _end(progress: ProgressFile, parts: Sequence[ProjectionReport]) -> None:
    """Remove what is of no more use."""
    wanted = {(part.layer, part.projection) for part in parts}
    if all((part.layer, part.projection) in wanted for part in progress.done):
        progress.remove()
    else:
        _say(f"what {progress.path} knows of other layers is kept")


def _is_report(path: Path) -> bool:
    """Whether a file begins as every version's report does."""
    with path.open("rb") as file:
        return re.match(rb'\{\s*"schema_version": ?\d+,\s*"version":', file.read(200)) is not None


def open_experts(checkpoint: Path, layers: str | None) -> ExpertFiles:
    """The experts of the chosen layers; of a download that goes on, those of layers that are complete.

    Raises:
        OperatorError: there is no such layer, or what the layers need is not there.
    """
    if layers is None:
        text = require_servable(checkpoint, weights_only=True).config.text_config
    else:
        text = read_config(checkpoint / "config.json").text_config
    if not text.moe_layers:
        raise bad_checkpoint(f"checkpoint {checkpoint} has no routed experts", "name one that has")
    chosen = text.moe_layers if layers is None else parse_layers(layers, text.moe_layers)
    return ExpertFiles(checkpoint, text, chosen)


def parse_layers(given: str, known: Sequence[int]) -> tuple[int, ...]:
    """The layers that ``1-3,7`` names, sorted. Layers without experts inside a range are passed over.

    Args:
        known: the layers that have routed experts, ascending.

    Raises:
        OperatorError: not of that form, or an end of a range is no layer with experts.
    """
    chosen: set[int] = set()
    for part in given.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", part)
        if match is None:
            raise _usage(f"--layers {given!r}: {part!r} is no layer", "write numbers and ranges, e.g. 1-3,7")
        first, last = int(match[1]), int(match[2] or match[1])
        inside = [layer for layer in known if first <= layer <= last]
        if first > last:
            raise _usage(f"--layers {given!r}: {part!r} ends before it begins", f"write {last}-{first}")
        if unknown := {first, last}.difference(known):
            closest = inside or [min(known, key=lambda layer: min(abs(layer - first), abs(layer - last)))]
            raise _usage(
                f"--layers {given!r}: layer {min(unknown)} has no routed experts",
                f"use {ranges(closest)} (layers with experts: {ranges(known)})",
            )
        chosen.update(inside)
    return tuple(sorted(chosen))


def _measure(request: Request, files: ExpertFiles, progress: ProgressFile) -> list[ProjectionReport]:
    """The report of every projection, taken from ``progress`` where an earlier run has finished it."""
    done = {(part.layer, part.projection): part for part in progress.done}
    wanted = [(layer, projection) for layer in files.layers for projection in Projection]
    todo = [key for key in wanted if key not in done]
    if len(todo) < len(wanted):
        _say(f"{len(wanted) - len(todo)} of {len(wanted)} projections are known from {progress.path}")
    rule = rule_of(request.requantisation)
    with watching(sum(files.nbytes(each) for _, each in todo), layers=len(files.layers)) as watch:
        for layer in files.layers:
            for projection in Projection:
                if (layer, projection) in todo:
                    part = _convert(request, files, layer, projection, rule, watch)
                    progress.append(part, files.shards_of(layer, projection))
                    done[layer, projection] = part
            watch.layer_done([done[layer, projection] for projection in Projection])
    return [done[key] for key in wanted]


def _convert(
    request: Request, files: ExpertFiles, layer: int, projection: Projection, rule: Rule, watch: Watch
) -> ProjectionReport:
    # Late, since its compiler takes a second to load, and a mistyped path should be told at once.
    from kimi_k3.conversion import cpu

    losses: dict[int, Loss] = {}
    with contextlib.closing(files.batches(layer, projection)) as batches:
        for batch in batches:
            try:
                _, tally = cpu.convert(
                    batch.packed,
                    batch.e8m0,
                    rule,
                    # What is lost does not depend on the layout, and this one takes every shape.
                    Int4Layout.PLAIN,
                    allow_nonfinite=request.requantisation.allow_nonfinite,
                )
            except NonFiniteGroupError as error:
                raise _nonfinite(request, files, layer, projection, batch, error) from None
            losses.update(zip(batch.experts, tally.losses(), strict=True))
            watch.advance(batch.nbytes)
    return summarise_projection(layer, projection, losses, bytes_mxfp4=files.nbytes(projection))


def _nonfinite(
    request: Request,
    files: ExpertFiles,
    layer: int,
    projection: Projection,
    batch: Batch,
    error: NonFiniteGroupError,
) -> OperatorError:
    """The same error, but for the expert's number in the layer, and with the tensor and shard to look at."""
    expert, byte = batch.experts[error.expert], batch.e8m0[error.expert, error.row, error.group]
    tensor, row, shard = files.tensor_of(layer, projection, expert, error.row)
    named = NonFiniteGroupError(expert, error.row, error.group, int(byte))
    return bad_checkpoint(
        f"checkpoint {request.checkpoint}: layer {layer}, {projection}, {named}: "
        f"row {row} of {tensor} in {shard}",
        "compare that shard with its source, or count such groups with --allow-nonfinite",
    )


def _say(line: str) -> None:
    print(f"kimi-k3: {printable(line)}", file=sys.stderr, flush=True)


def _usage(what: str, remedy: str) -> OperatorError:
    return OperatorError(what, remedy=remedy, exit_code=ExitCode.USAGE)
