# SPDX-License-Identifier: Apache-2.0
"""Where kernels, graphs and settings are cached: writable, and not on a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_k3.preflight.finding import Finding, failed, passed, unknown, warned
from kimi_k3.preflight.machine import Machine
from kimi_k3.preflight.mounts import MOUNTINFO, Mount, mount_of, parse_mountinfo
from kimi_k3.preflight.places import existing, inside, unwritable

JIT_SEED = "cache-aiter-jit-seed"


@dataclass(frozen=True)
class Cache:
    """One cache.

    Attributes:
        check: name of the check.
        variable: that names its directory.
        default: where it is otherwise, with variables; ``None`` where only the library knows.
        executable: whether code is loaded from it.
        on_cpu: whether a start on a CPU uses it as well.
    """

    check: str
    variable: str
    default: str | None
    executable: bool
    on_cpu: bool = False


@dataclass(frozen=True)
class Place:
    """Where a cache will be.

    Attributes:
        directory: as the environment says it.
        source: the variable that decides it.
    """

    directory: Path
    source: str

    def __str__(self) -> str:
        """As it is told."""
        return f"{self.directory} ({self.source})"


CACHES = (
    Cache("cache-vllm", "VLLM_CACHE_ROOT", "${XDG_CACHE_HOME}/vllm", executable=False, on_cpu=True),
    Cache("cache-triton", "TRITON_CACHE_DIR", "${HOME}/.triton/cache", executable=True),
    Cache("cache-inductor", "TORCHINDUCTOR_CACHE_DIR", "${TMPDIR}", executable=True),
    Cache("cache-torch-extensions", "TORCH_EXTENSIONS_DIR", "${XDG_CACHE_HOME}", executable=True),
    Cache("cache-aiter-jit", "AITER_JIT_DIR", None, executable=True),
    Cache("cache-flydsl", "FLYDSL_RUNTIME_CACHE_DIR", "${HOME}/.flydsl/cache", executable=True),
    Cache("cache-flydsl-autotune", "FLYDSL_AUTOTUNE_CACHE_DIR", None, executable=False),
)
"""What the processes write while they start, on gfx942."""


def check_caches(machine: Machine, variables: Mapping[str, str], *, on_gpus: bool) -> Iterator[Finding]:
    """Each cache of such a start.

    Args:
        variables: the environment that vLLM will have.
        on_gpus: whether it runs on GPUs.
    """
    mounts = parse_mountinfo(machine.text(MOUNTINFO) or "")
    for cache in CACHES:
        if on_gpus or cache.on_cpu:
            place = place_of(cache, variables)
            if place is None and cache.variable not in variables and cache.default is None:
                continue
            yield _check(machine, cache, place, mounts, on_gpus=on_gpus)
    if on_gpus and (seed := _check_seed(machine, variables)) is not None:
        yield seed


def place_of(cache: Cache, variables: Mapping[str, str]) -> Place | None:
    """Where a cache will be; ``None`` if that cannot be told."""
    if given := variables.get(cache.variable):
        path = given.replace("~", variables.get("HOME", "~"), 1) if given.startswith("~/") else given
        return Place(Path(path), cache.variable)
    if cache.default is None:
        return None
    name = cache.default.partition("}")[0].removeprefix("${")
    base, source = variables.get(name), name
    if not base and name == "TMPDIR":
        base, source = "/tmp", "without TMPDIR"
    elif not base and name == "XDG_CACHE_HOME" and (home := variables.get("HOME")):
        base, source = f"{home}/.cache", "HOME"
    return Place(Path(cache.default.replace(f"${{{name}}}", base)), source) if base else None


def _check(
    machine: Machine, cache: Cache, place: Place | None, mounts: Sequence[Mount], *, on_gpus: bool
) -> Finding:
    elsewhere = f"set {cache.variable} to a directory on a local disk"
    if place is None:
        return unknown(cache.check, f"neither {cache.variable} nor HOME is set", elsewhere)
    if not place.directory.is_absolute():
        return warned(cache.check, f"{place}: is not absolute", f"{elsewhere}, beginning with /")
    there = existing(machine.path(place.directory))
    if (why := unwritable(machine, there)) is not None:
        # On a CPU vLLM only complains.
        state = failed if on_gpus else warned
        return state(cache.check, f"{place}: {why}", elsewhere)
    mount = mount_of(inside(machine, there.resolve()), mounts)
    if mount is None:
        return unknown(
            cache.check, f"{place.directory}: {MOUNTINFO} does not tell on which file system it is", elsewhere
        )
    if mount.network:
        return warned(
            cache.check,
            f"{place} is on {mount.kind} at {mount.point}: many small files, minutes "
            "of stall, and other nodes write there, too",
            elsewhere,
        )
    if cache.executable and "noexec" in mount.options:
        return failed(
            cache.check,
            f"{place} is on {mount.point}, mounted noexec: no code can be loaded",
            f"{elsewhere} that allows it, or mount that one with exec",
        )
    return passed(cache.check, f"{place.directory} can be written, on {mount.kind}")


def _check_seed(machine: Machine, variables: Mapping[str, str]) -> Finding | None:
    """A redirected ``AITER_JIT_DIR`` needs what the image has compiled already."""
    named, package = variables.get("AITER_JIT_DIR"), machine.package("aiter")
    if not named or package is None:
        return None
    try:
        built = {path.name for path in (package / "jit").glob("*.so")}
        there = {path.name for path in machine.path(named).glob("*.so")}
    except OSError as error:
        return unknown(JIT_SEED, f"{named}: {error.strerror or error}", "make it readable")
    if missing := built - there:
        return warned(
            JIT_SEED,
            f"AITER_JIT_DIR={named} lacks {len(missing)} of the {len(built)} modules that are compiled in "
            f"{package / 'jit'}, and a start compiles them again",
            f"once: mkdir -p {named} && cp -a {package / 'jit'}/. {named}/",
        )
    return passed(JIT_SEED, f"{named} has all {len(built)} modules that are compiled in {package / 'jit'}")
