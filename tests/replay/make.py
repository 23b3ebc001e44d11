# SPDX-License-Identifier: Apache-2.0
"""Makes the recording of a start at real scale: ``python -m tests.replay.make``.

NOT MEASURED ON A GPU. The sizes are Kimi-K3's (896 experts, hidden sizes and shards as published), but for 96
layers with experts instead of 92, behind the one dense layer; ranks and layout are those of the profile ep8.
Durations and losses are made up by a seeded generator within what is plausible, so that page, API, metrics
and terminal can be looked at with as much on them as a real start puts there.
"""

from __future__ import annotations

import math
import random
from typing import Any

from kimi_k3.journal.models import SUPERVISOR_FILE, rank_file
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import ConsentSource, Projection, ScaleRule, Weights

from .recording import CONVERSION, DEFAULT, Recording, Write

SEED = 942
ABOUT = (
    f"A start of 96 layers with experts on 8 ranks, made by tests/replay/make.py with seed {SEED}. "
    "Nothing in it was measured on a GPU."
)
START_ID = "20260101T080000Z-942"
RANKS = 8
MOE_LAYERS = tuple(range(1, 97))
EXPERTS = 896
SHARDS = 96
GIB = 2**30
HIDDEN, INTERMEDIATE = 3584, 3072
WEIGHTS_OF = {Projection.W13: 2 * INTERMEDIATE * HIDDEN, Projection.W2: HIDDEN * INTERMEDIATE}
"""Weights of one expert."""

OTHER_BYTES = 24 * GIB
"""What a rank reads beside its experts."""

KV_CACHE_BYTES = 18 * GIB
BAD_LAYER, BAD_PROJECTION = 61, Projection.W2
SLOW_RANK = 5
GRAPHS = {"mixed prefill-decode, PIECEWISE": 51, "decode, FULL": 51}


def make() -> Recording:
    """The recording; the same at each call."""
    random_numbers = random.Random(SEED)
    writes: list[Write] = []
    ends = [_rank(rank, random_numbers, writes) for rank in range(RANKS)]
    _supervisor(writes, loaded=max(end[0] for end in ends), converted=max(end[1] for end in ends))
    return Recording(about=ABOUT, writes=tuple(sorted(writes, key=lambda one: one.at)))


def _supervisor(writes: list[Write], *, loaded: float, converted: float) -> None:
    def write(at: float, phase: Phase | None = None, **changes: Any) -> None:
        at = round(at, 1)
        appended = {} if phase is None else {"phases": [{"phase": phase, "at": at}]}
        writes.append(Write(at, SUPERVISOR_FILE, changes, appended))

    def step(at: float, phase: Phase, name: str, since: float, *count: int) -> None:
        done, total = count if count else (None, None)
        one = {"phase": phase, "name": name, "since": round(since, 1), "done": done, "total": total}
        write(at, None, step=one)

    write(0.0, Phase.PREFLIGHT, **_first_record())
    write(8.4, Phase.LOADING, engine_pid=119)
    write(loaded + 0.3, Phase.CONVERTING)
    compiling = converted + 0.4
    write(compiling, Phase.COMPILING)
    step(compiling + 1, Phase.COMPILING, "profiling memory", compiling + 1)
    step(compiling + 22, Phase.COMPILING, "compiling", compiling + 22)
    step(compiling + 88, Phase.COMPILING, "laying out the KV cache", compiling + 88)
    write(compiling + 91, None, kv_cache_bytes=KV_CACHE_BYTES)
    for rank in range(RANKS):
        used = _loaded_bytes() + sum(map(_groups, Projection)) * len(MOE_LAYERS) + KV_CACHE_BYTES
        reading = {"memory": _memory(used, used + 3 * GIB)}
        writes.append(Write(round(compiling + 91, 1), rank_file(rank), reading, {}))
    began = compiling + 92
    write(began, Phase.CAPTURING)
    for kind, count in GRAPHS.items():
        for done in range(count + 1):
            step(
                began + 0.9 * done,
                Phase.CAPTURING,
                f"capturing graphs ({kind})",
                began,
                done,
                count,
            )
        began += 0.9 * count + 1.0
    step(began, Phase.CAPTURING, "warming up kernels", began)
    warming = began + 14
    write(warming, Phase.WARMING)
    step(warming, Phase.WARMING, "starting the API server", warming)
    step(warming + 9, Phase.WARMING, "waiting for the first completion", warming + 9)
    ready = round(warming + 13, 1)
    write(
        ready,
        Phase.READY,
        canary={"at": ready, "seconds": 2.31, "completion_tokens": 8},
    )


def _first_record() -> dict[str, Any]:
    return {
        "start_id": START_ID,
        "pid": 7,
        "started_at": 0.0,
        "profile": "ep8",
        "checkpoint": {
            "name": "kimi-k3",
            "total_bytes": 1_560_860_324_864,
            "shards": SHARDS,
            "decoder_layers": 1 + len(MOE_LAYERS),
            "moe_layers": MOE_LAYERS,
            "experts": EXPERTS,
        },
        "served_model_name": "kimi-k3",
        "weights": Weights.INT4,
        "requantisation": _requantisation(negative_scale=True),
        "consent": ConsentSource.FLAG,
        "world_size": RANKS,
        "engine_url": "http://127.0.0.1:8000",
        "start_timeout_seconds": 7200,
        "planned": {
            "weights_bytes": 212 << 30,
            "transient_bytes": 1 << 30,
            "step_bytes": 9 << 30,
            "kv_cache_bytes": 17 << 30,
            "limit_bytes": 256 << 30,
        },
        "notices": [
            {
                "check": "profile-unverified",
                "what": "profile ep8: nobody has run it on its hardware and reported it",
                "remedy": "hold its memory and speed against the plan, and report what you see",
            }
        ],
    }


def _requantisation(*, negative_scale: bool) -> dict[str, Any]:
    return {"rule": ScaleRule.MSE, "negative_scale": negative_scale, "allow_nonfinite": False}


def _rank(rank: int, random_numbers: random.Random, writes: list[Write]) -> tuple[float, float]:
    """One rank's way; returns when it had loaded and when it had converted, in seconds."""
    file = rank_file(rank)
    total = _loaded_bytes() - 2 * GIB
    phase_at = round(47.0 + random_numbers.uniform(0, 4), 1)
    first = {
        "start_id": START_ID,
        "rank": rank,
        "pid": 201 + rank,
        "weights": Weights.INT4,
        "requantisation": _requantisation(negative_scale=True),
        "memory": _memory(2 * GIB, 2 * GIB),
    }
    writes.append(Write(phase_at, file, first, {"phases": [{"phase": Phase.LOADING, "at": phase_at}]}))
    # Why negative scales are refused, and so the warning signs-refused.
    proved = {
        "backend": "AITER_INT4_BF16",
        "proof": {"relative_error": 0.0041, "relative_error_with_signs": 1.97, "signs_right": False},
        "requantisation": _requantisation(negative_scale=False),
    }
    began = round(phase_at + 18 + random_numbers.uniform(0, 2), 1)
    writes.append(Write(round(began - 1, 1), file, proved, {}))
    now = began
    for shard in range(1, SHARDS + 1):
        now += random_numbers.uniform(8.0, 12.0) * (1.18 if rank == SLOW_RANK else 1.0)
        done = total * shard // SHARDS
        loading = {
            "bytes_done": done,
            "bytes_total": total,
            "shards_done": shard,
            "shards_total": SHARDS,
            "began_at": began,
        }
        used = 2 * GIB + done
        writes.append(Write(round(now, 1), file, {"loading": loading, "memory": _memory(used, used)}, {}))
    loaded = round(now + 0.2, 1)
    writes.append(Write(loaded, file, {}, {"phases": [{"phase": Phase.CONVERTING, "at": loaded}]}))
    now, used, peak = loaded, 2 * GIB + total, 2 * GIB + total
    for layer in MOE_LAYERS:
        for projection in Projection:
            begin, before = now, used
            now = round(
                now + random_numbers.uniform(0.5, 0.8) * (1.5 if projection is Projection.W13 else 1), 2
            )
            groups = _groups(projection)
            used += groups  # an int4 scale is a byte larger than an e8m0
            peak = max(peak, used + 18 * groups)
            loss = _loss(layer, projection, random_numbers)
            one = loss | {
                "started_at": begin,
                "ended_at": now,
                "memory_before": {"kind": "device", "used_bytes": before},
                "memory_after": _memory(used, peak),
            }
            writes.append(
                Write(
                    now,
                    file,
                    {"memory": _memory(used, peak)},
                    {"conversions": [[one[name] for name in CONVERSION]]},
                )
            )
    converted = round(now + 0.1, 1)
    writes.append(Write(converted, file, {}, {"phases": [{"phase": Phase.COMPILING, "at": converted}]}))
    return loaded, converted


def _loss(layer: int, projection: Projection, random_numbers: random.Random) -> dict[str, Any]:
    groups = _groups(projection)
    bad = layer == BAD_LAYER and projection is BAD_PROJECTION
    wave = 1 + 0.06 * math.sin(layer / 9) + random_numbers.gauss(0, 0.015)
    relative = (0.0117 if bad else 0.0042 if projection is Projection.W13 else 0.0040) * wave
    energy = round(32 * groups * 4.1e-4 * (1 + layer / 300) * random_numbers.uniform(0.98, 1.02), 1)
    lossless = round(groups * (0.09 if bad else random_numbers.uniform(0.25, 0.29)))
    return {
        "layer": layer,
        "projection": projection,
        "experts": EXPERTS // RANKS,
        "bytes_read": 17 * groups,
        "bytes_written": 18 * groups,
        "groups": groups,
        "lossless_groups": lossless,
        "zero_groups": random_numbers.randrange(40),
        "nonfinite_groups": 0,
        "clamped_groups": 0,
        "squared_error": round(energy * relative, 2),
        "energy": energy,
        "max_error": round(random_numbers.uniform(0.02, 0.05) * (4 if bad else 1), 5),
        "worst_expert": random_numbers.randrange(EXPERTS // RANKS),
        "worst_expert_relative_mse": round(relative * random_numbers.uniform(1.1, 1.5), 6),
    }


def _groups(projection: Projection) -> int:
    return WEIGHTS_OF[projection] * (EXPERTS // RANKS) // 32


def _expert_bytes(projection: Projection) -> int:
    return 17 * _groups(projection)


def _loaded_bytes() -> int:
    """What a rank has allocated once everything is read, with the runtime's 2 GiB."""
    return 2 * GIB + sum(_expert_bytes(one) for one in Projection) * len(MOE_LAYERS) + OTHER_BYTES


def _memory(used: int, peak: int) -> dict[str, Any]:
    return {"kind": "device", "used_bytes": used, "peak_bytes": peak, "total_bytes": 256 * GIB}


if __name__ == "__main__":
    make().save(DEFAULT)
    print(f"{DEFAULT}: {DEFAULT.stat().st_size / 1000:.0f} kB")
