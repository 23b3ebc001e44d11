# SPDX-License-Identifier: Apache-2.0
"""The picture as text of at most the terminal's width: the state first, then what is wrong, then how far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kimi_k3.journal.models import PlannedMemory
from kimi_k3.sidecar.conversion import Conversion, LayerLoss
from kimi_k3.sidecar.memory import Memory, RankMemory
from kimi_k3.sidecar.readiness import Reason, ReasonCode
from kimi_k3.sidecar.startup import RankProgress, Startup
from kimi_k3.sidecar.status import Deployment, Status
from kimi_k3.sidecar.warning import Severity, Warnings
from kimi_k3.watch.picture import Picture, State
from kimi_k3.words.phases import STARTING, Phase

BAR_CELLS = 10
MOST_RANKS = 16
"""More ranks than these are told by those that are furthest behind."""

WORST_LAYERS = 5
OLD_SECONDS = 2.0
"""Figures older than this say how old they are."""

ENOUGH = (ReasonCode.SUPERVISOR_MISSING, ReasonCode.STARTING, ReasonCode.DRAINING, ReasonCode.ENDED)
"""Reasons from which the others follow."""

UNKNOWN = "?"
_STYLES = {
    State.READY: "bold green",
    State.NOT_READY: "bold yellow",
    State.ENDED: "bold red",
    State.UNREACHABLE: "bold red",
}


def draw(picture: Picture, now: float) -> RenderableType:
    """Everything; of a sidecar that does not answer only that, and what it told last, marked as old.

    Args:
        now: on the watcher's own clock, in seconds.
    """
    parts: list[RenderableType] = [_headline(picture, now)]
    parts += [Text(f"! {note}", style="yellow") for note in picture.notes]
    if picture.error is not None:
        if picture.answered is not None:
            old = duration(picture.silent_seconds(now))
            parts.append(Text(f"What follows is {old} old.", style="bold"))
            parts += [_faded(part) for part in _body(picture, now)]
        return Group(*parts)
    return Group(*parts, *_body(picture, now))


def _headline(picture: Picture, now: float) -> Text:
    if picture.error is not None:
        silent = duration(picture.silent_seconds(now))
        return Text(f"{picture.url}: no answer since {silent}: {picture.error}", style="bold red")
    state = picture.state
    line = Text().append(state.replace("-", " ").upper(), style=_STYLES[state])
    startup, status = picture.startup, picture.status
    if startup is not None:
        line.append(f"  {startup.description}")
        if startup.elapsed_seconds is not None and state is not State.READY:
            line.append(f"  {duration(startup.elapsed_seconds)} since the start")
    if status is not None and status.deployment is not None:
        line.append(f"\n{_served(status)}  {picture.url}", style="dim")
    return line


def _served(status: Status) -> str:
    deployment, weights = status.deployment, status.weights
    assert deployment is not None
    loss = {True: " (lossy)", False: " (lossless)", None: ""}[weights.lossy if weights else None]
    served = f" {weights.weights}{loss}" if weights else ""
    named = f"{deployment.served_model_name}: profile {deployment.profile}"
    return f"{named},{served}, {deployment.world_size} ranks{_nodes(deployment)}"


def _nodes(deployment: Deployment) -> str:
    if deployment.nodes == 1:
        return ""
    which = f", this is node {deployment.node}" if deployment.node else ""
    return f" on {deployment.nodes} nodes{which}"


def _body(picture: Picture, now: float) -> Iterator[RenderableType]:
    old = "" if picture.detailed is None else _age(now - picture.detailed)
    yield from (Text(f"- {reason.message}") for reason in told_reasons(picture))
    yield from _explanation(picture.status)
    yield from _previous(picture.status)
    if picture.warnings is not None:
        yield from _warnings(picture.warnings)
    if picture.startup is not None:
        yield _phases(picture.status, picture.startup)
        if picture.startup.ranks:
            yield from _ranks(picture.startup, picture.memory, old)
    if picture.conversion is not None:
        yield from _conversion(picture.conversion, old)
    if picture.memory is not None:
        yield from _machine(picture.memory)


def _explanation(status: Status | None) -> Iterator[Text]:
    """What the diagnosis makes of the end, with the engine's own line."""
    ending = status.deployment.ending if status is not None and status.deployment is not None else None
    if ending is None or ending.explanation is None:
        return
    known = ending.explanation
    yield Text(f"  {known.name}: {known.cause}. To do: {known.remedy}")
    if known.text is not None:
        where = "" if known.line is None else f"line {known.line}: "
        yield Text(f"  engine.log, {where}{known.text}", style="dim")


def _previous(status: Status | None) -> Iterator[Text]:
    """Why the start before failed, until this one serves: between two starts there is no other reason."""
    previous = status.deployment.previous if status is not None and status.deployment is not None else None
    if status is None or previous is None or status.phase not in STARTING or previous.phase is Phase.STOPPED:
        return
    ending = previous.ending
    why = "its supervisor was killed" if ending is None else f"exit code {ending.exit_code}: {ending.reason}"
    yield Text(f"- The start before, {previous.start_id}, ended in {previous.reached}: {why}", style="yellow")
    if ending is not None and ending.explanation is not None:
        yield Text(
            f"  {ending.explanation.name}: {ending.explanation.cause}. To do: {ending.explanation.remedy}"
        )


def told_reasons(picture: Picture) -> list[Reason]:
    """Why it is not ready; where the phase says so, that alone: the rest follows from it."""
    reasons = picture.readiness.reasons if picture.readiness else []
    enough = [reason for reason in reasons if reason.code in ENOUGH]
    return enough or reasons


def _age(seconds: float) -> str:
    return f" ({duration(seconds)} ago)" if seconds >= OLD_SECONDS else ""


def _warnings(warnings: Warnings) -> Iterator[Text]:
    ordered = sorted(
        warnings.warnings,
        key=lambda one: (one.severity is not Severity.CRITICAL, one.acknowledged is not None),
    )
    for one in ordered:
        style = "bold red" if one.severity is Severity.CRITICAL else "yellow"
        line = Text(f"! {one.severity} {one.id}: ", style=style)
        line.append(f"{one.message} To do: {one.remedy}")
        if one.acknowledged is not None:
            note = f": {one.acknowledged.note}" if one.acknowledged.note else "."
            line.append(f" Acknowledged by {one.acknowledged.by}{note}", style="dim")
        yield line


def _phases(status: Status | None, startup: Startup) -> Table:
    table = _table(Column("phase"), Column("took", justify="right"), Column("how far"))
    spent = {span.phase: span.seconds for span in status.history} if status else {}
    ordinary = [one for one in STARTING if one not in (Phase.PENDING, Phase.DOWNLOADING)]
    shown = sorted({*ordinary, *spent}, key=lambda phase: phase.position)
    for phase in shown:
        if phase is startup.phase:
            left = startup.remaining_seconds
            far = Text("" if startup.fraction is None else bar(startup.fraction))
            if left is not None:
                far.append(f"  {duration(left)} left")
            table.add_row(Text(f"> {phase}", style="bold"), duration(startup.phase_seconds), far)
        elif phase in spent:
            table.add_row(f"  {phase}", duration(spent[phase]), "done")
        else:
            table.add_row(Text(f"  {phase}", style="dim"), "", "")
    return table


def _ranks(startup: Startup, memory: Memory | None, old: str) -> Iterator[RenderableType]:
    converts = any(rank.conversions_expected for rank in startup.ranks)
    columns = [Column("rank", justify="right"), Column("loaded")]
    columns += [Column("converted")] if converts else []
    table = _table(*columns, Column(f"GiB: used, most, of, planned{old}"))
    memories = {one.rank: one for one in memory.ranks} if memory else {}
    behind = sorted(startup.ranks, key=_done)
    shown = sorted(behind[:MOST_RANKS], key=lambda rank: rank.rank)
    for rank in shown:
        cells = [str(rank.rank), bar(_ratio(rank.bytes_done, rank.bytes_total))]
        if converts:
            cells.append(bar(_ratio(rank.conversions_done, rank.conversions_expected)))
        table.add_row(*cells, _rank_memory(memories.get(rank.rank)))
    yield table
    if len(behind) > len(shown):
        yield Text(f"  and {len(behind) - len(shown)} more ranks, which are further", style="dim")


def _done(rank: RankProgress) -> tuple[float, float]:
    return (_ratio(rank.conversions_done, rank.conversions_expected) or 0.0, rank.bytes_done or 0)


def _rank_memory(one: RankMemory | None) -> str:
    """Used, most used, capacity and planned, in GiB."""
    reading = one.reading if one else None
    parts = [
        gib(reading.used_bytes if reading else None),
        gib(reading.peak_bytes if reading else None),
        gib(reading.total_bytes if reading else None),
        gib(_planned_bytes(one.planned if one else None)),
    ]
    return ", ".join(parts)


def _planned_bytes(planned: PlannedMemory | None) -> int | None:
    """The most at any moment: while the weights are converted there is no cache, and later nothing else."""
    if planned is None or planned.kv_cache_bytes is None:
        return None
    serving = planned.kv_cache_bytes + (planned.step_bytes or 0)
    return planned.weights_bytes + max(planned.transient_bytes, serving)


def _conversion(conversion: Conversion, old: str) -> Iterator[RenderableType]:
    progress, total = conversion.progress, conversion.total
    if progress is None or total is None:
        yield Text(conversion.note, style="dim")
        return
    rule = f", {conversion.requantisation}" if conversion.requantisation else ""
    yield Text(f"Conversion{old}: {progress.done} of {progress.expected} {bar(progress.fraction)}{rule}")
    if total.groups is None:
        return
    exact = UNKNOWN if total.lossless_ratio is None else percent(total.lossless_ratio)
    yield Text(f"  relative error {figure(total.relative_mse)}, {exact} of the groups exact; worst layers:")
    table = _table(
        Column("  layer", justify="right"),
        Column("relative error", justify="right"),
        Column("largest error", justify="right"),
        Column("exact groups", justify="right"),
        Column("ranks"),
    )
    for layer in worst_layers(conversion.layers):
        ranks = f"{len(layer.ranks)} of {len(layer.ranks) + len(layer.missing_ranks)}"
        table.add_row(
            f"{layer.layer} {layer.projection}",
            figure(layer.relative_mse),
            figure(layer.max_error),
            UNKNOWN if layer.lossless_ratio is None else percent(layer.lossless_ratio),
            ranks,
        )
    yield table


def worst_layers(layers: Iterable[LayerLoss]) -> list[LayerLoss]:
    """The layer projections that lost most in proportion, the worst first."""
    known = [layer for layer in layers if layer.relative_mse is not None]
    return sorted(known, key=lambda layer: layer.relative_mse or 0.0, reverse=True)[:WORST_LAYERS]


def _machine(memory: Memory) -> Iterator[Text]:
    host, cgroup = memory.host, memory.cgroup
    line = f"Machine: {gib(host.available_bytes)} of {gib(host.total_bytes)} GiB available"
    if cgroup is not None:
        limit = "" if cgroup.limit_bytes is None else f" of {gib(cgroup.limit_bytes)}"
        line += f"; the sidecar's control group: {gib(cgroup.used_bytes)}{limit} GiB used"
    yield Text(line, style="dim")
    for device in memory.devices:
        used, most = gib(device.vram_used_bytes), gib(device.vram_total_bytes)
        yield Text(f"  {device.name}: {used} of {most} GiB", style="dim")


def bar(fraction: float | None) -> str:
    """A bar with its percentage; ``?`` where it is unknown, which is not 0."""
    if fraction is None:
        return UNKNOWN
    share = min(max(fraction, 0.0), 1.0)
    full = int(share * BAR_CELLS)
    return f"{'#' * full}{'.' * (BAR_CELLS - full)} {percent(share):>5}"


def percent(share: float) -> str:
    """As the page shows it; 100 % is all of it, and not almost all."""
    return f"{int(share * 100)} %"


def duration(seconds: float | None) -> str:
    """Seconds in an operator's words."""
    if seconds is None:
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def gib(size: int | None) -> str:
    """Bytes in GiB, without the unit."""
    return UNKNOWN if size is None else f"{size / 2**30:.1f}"


def figure(value: float | None) -> str:
    """Three digits of it."""
    return UNKNOWN if value is None else f"{value:.3g}"


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _table(*columns: Column) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))


def _faded(part: RenderableType) -> RenderableType:
    if isinstance(part, Text):
        return Text(part.plain, style="dim")
    if isinstance(part, Table):
        part.style = "dim"
    return part
