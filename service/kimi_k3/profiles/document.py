# SPDX-License-Identifier: Apache-2.0
"""``docs/profiles.md``, made of the profiles: ``python -m kimi_k3.profiles.document docs/profiles.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from kimi_k3.profiles.load import load_profile, profile_names
from kimi_k3.profiles.rules import PLANNED_FLAGS, PLANNED_VARIABLES, REFUSED_FLAGS, REFUSED_VARIABLES
from kimi_k3.profiles.schema import Evidence, Profile, Verified

_ABOUT = """\
<!-- Made by `python -m kimi_k3.profiles.document docs/profiles.md` from the profiles; edit those. -->
# Profiles

A profile is a named deployment: `kimi-k3 serve CHECKPOINT --profile NAME` starts it, unless the table says
"not yet"; `kimi-k3 plan CHECKPOINT --profile NAME` tells what each will use, and the command that it stands
for. Everything in it has a reason, and the evidence for it is told with what was different. A profile may
extend one other; below, each is complete.
"""

_READING = """\
## Reading 1.42 TiB: filter or prefetch

Without further flags every rank reads the whole checkpoint. Two flags of vLLM avoid that in opposite ways,
and a profile has one or the other:

| | `--enable-ep-weight-filter` | `--safetensors-load-strategy prefetch` |
|---|---|---|
| needs | expert parallelism, no `--enable-eplb` | 1.42 TiB of page cache, also in a container's limit |
| a rank reads | its own packed experts, all scales and the rest | everything, once a node, in order |
| good with | local NVMe; any amount of memory | storage that is slow for many readers (NFS, WekaFS) |
| profiles | with expert parallelism | with slices of every expert, where each rank touches every page |

With the filter the strategy is `lazy`, not vLLM's default, which prefetches by itself on NFS and Lustre when
memory allows, and so reads what the filter spares. Which is faster on a network file system, where the node
has the memory for prefetch, is not measured: compare `ep8` with `tp8` there.
"""


def profiles_document() -> str:
    """The whole document, as it must stand in ``docs/profiles.md``."""
    profiles = [load_profile(name) for name in profile_names()]
    return "\n".join(line.rstrip() for line in _lines(profiles)) + "\n"


def _lines(profiles: list[Profile]) -> Iterator[str]:
    yield from _ABOUT.splitlines()
    yield ""
    yield "| profile | for | ranks | experts as | verified | `kimi-k3 serve` |"
    yield "|---|---|---|---|---|---|"
    for profile in profiles:
        name = f"[`{profile.name}`](#{profile.name})"
        starts = "starts it" if profile.not_startable is None else f"not yet: {profile.not_startable}"
        yield _row(
            name, profile.title, str(profile.ranks), profile.weights.value, profile.verified.value, starts
        )
    yield ""
    yield from (f"* **{state}**: {state.meaning}." for state in Verified)
    yield ""
    yield from _READING.splitlines()
    for profile in profiles:
        yield ""
        yield from _profile(profile)
    yield ""
    yield from _refusals()


def _profile(profile: Profile) -> Iterator[str]:
    yield f"## {profile.name}"
    yield ""
    yield f"{_sentence(profile.title)} {_sentence(profile.summary)}"
    if profile.not_startable is not None:
        yield ""
        yield f"**`kimi-k3 serve` cannot start it yet:** it {profile.not_startable}."
    if profile.extends is not None:
        yield ""
        yield f"Extends [`{profile.extends}`](#{profile.extends})."
    yield ""
    yield "| | | why |"
    yield "|---|---|---|"
    if profile.gpu is not None:
        count = f"{profile.nodes} x {profile.gpu.per_node}"
        each = f"{profile.gpu.architecture}, {profile.gpu.memory_gib} GiB each"
        yield _row("GPUs", f"{count} {each}", profile.gpu.why)
    yield _row("ranks", _sizes(profile), profile.sizes_why)
    yield _row("experts", *_experts(profile))
    yield _row("start", f"{profile.start_timeout_seconds} s", profile.start_timeout.why)
    yield _row("leaving", f"{profile.readiness_delay_seconds} s", profile.readiness_delay.why)
    yield _row("drain", f"{profile.drain_timeout_seconds} s", profile.drain_timeout.why)
    yield ""
    yield from _table("flag", {name: (flag.value, flag.why) for name, flag in profile.flags.items()})
    yield ""
    yield from _table(
        "variable", {name: (each.value, each.why) for name, each in profile.environment.items()}
    )
    if profile.left_open:
        yield ""
        yield "Left to vLLM or to the image:"
        yield ""
        yield from (f"* `{name}`: {_line(why)}." for name, why in profile.left_open.items())
    yield ""
    yield f"Evidence: **{profile.verified}**, {profile.verified.meaning}."
    if profile.evidence:
        yield ""
    for found in profile.evidence:
        yield from _evidence(found)


def _experts(profile: Profile) -> tuple[str, str]:
    if profile.weights.lossy:
        return f"{profile.weights}, scales by rule {profile.scale_rule}", "lossy: a start needs consent"
    if profile.scale_rule is None:
        return profile.weights.value, "lossless; int4 is refused"
    return profile.weights.value, f"lossless; with --weights int4 lossy, scales by rule {profile.scale_rule}"


def _sizes(profile: Profile) -> str:
    sizes = {
        "tensor": profile.tensor_parallel_size,
        "pipeline": profile.pipeline_parallel_size,
        "data": profile.data_parallel_size,
        "decode context": profile.decode_context_parallel_size,
    }
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "tensor"]
    if profile.data_parallel_size_local > 1:
        parts.append(f"data on each node {profile.data_parallel_size_local}")
    return ", ".join([*parts, "whole experts" if profile.expert_parallel else "slices of experts"])


def _table(kind: str, entries: Mapping[str, tuple[object, str]]) -> Iterator[str]:
    yield f"| {kind} | value | why |"
    yield "|---|---|---|"
    for name, (value, why) in entries.items():
        yield _row(f"`{name}`", "" if value is None else f"`{value}`", why)


def _evidence(each: Evidence) -> Iterator[str]:
    yield f"* {_sentence(f'{each.who}, {each.when}, on {each.hardware} with {each.software}: {each.what}')}"
    yield f"  Source: {_line(each.source)}."
    if each.differs is not None:
        yield f"  Different from this profile: {_line(each.differs)}."


def _refusals() -> Iterator[str]:
    yield "## What a profile may not say"
    yield ""
    yield "Refused when a profile is read, with the reason; so are combinations that contradict each other"
    yield "(`service/kimi_k3/profiles/rules.py`)."
    yield ""
    yield "| name | why |"
    yield "|---|---|"
    for name, why in sorted({**REFUSED_FLAGS, **REFUSED_VARIABLES}.items()):
        yield _row(f"`{name}`", why)
    yield ""
    yield "Written by the plan, since they belong to one start or follow from other values:"
    planned = (f"`{name}`" for name in sorted(PLANNED_FLAGS | PLANNED_VARIABLES))
    yield f"{', '.join(planned)}, `KIMI_K3_*`."


def _row(*cells: str) -> str:
    escaped = (_line(cell).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _line(text: str) -> str:
    return " ".join(text.split())


def _sentence(text: str) -> str:
    line = _line(text)
    return line[:1].upper() + line[1:] + ("" if line.endswith(".") else ".")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(profiles_document(), encoding="utf-8")
