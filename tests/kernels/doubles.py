# SPDX-License-Identifier: Apache-2.0
"""AITER and FlyDSL in the place of real ones: the three generations of the entry, written after its source.

Each reads the table, starts processes and writes files as the real one does, but for the kernels' contents.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kimi_k3.kernels.installed import Aiter, find_aiter
from kimi_k3.kernels.table import COLUMNS, INT4

HERE = Path(__file__).with_name("double")


class Generation(StrEnum):
    """Of AITER's entry: AITER 2026-08, the one of 2026-09, and the one after it."""

    FIRST = "first"
    SECOND = "second"
    THIRD = "third"


@dataclass(frozen=True)
class Double:
    """An installed pair of packages.

    Attributes:
        site: for Python's search path.
        generation: of the entry.
    """

    site: Path
    generation: Generation

    @property
    def aiter(self) -> Aiter:
        """As it is found by its files."""
        return find_aiter((str(self.site),))

    @property
    def hanging(self) -> Path:
        """Is there as soon as a compiler hangs."""
        return self.site / "hanging"

    def behave(self, **told: Iterable[str]) -> None:
        """What becomes of kernels: ``fail``, ``abort`` or ``hang``, by parts of their names."""
        document = {**{what: list(parts) for what, parts in told.items()}, "hanging": str(self.hanging)}
        (self.site / "behaviour.json").write_text(json.dumps(document))

    def ship(self, rows: Iterable[list[str]]) -> Path:
        """The tuned table that comes with it."""
        path = self.site / "aiter/configs/model_configs/kimik3_i4_tuned_fmoe.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
        return path


def install(site: Path, generation: Generation, *, flydsl: str = "0.4.2", one_less: bool = True) -> Double:
    """Write both packages below ``site``.

    Args:
        site: a directory for Python's search path.
        generation: of the entry.
        flydsl: its version, which decides the layout of its cache; ``0.2.x`` cannot only look.
        one_less: whether rows are looked up for one expert less with expert parallelism.
    """
    entry = "per_row.py" if generation is Generation.THIRD else "per_kernel.py"
    for name, source in {
        "aiter/aot/flydsl/moe.py": entry,
        "aiter/aot/flydsl/common.py": "pool.py",
        "aiter/jit/core.py": "config.py",
        "aiter/ops/flydsl/moe_kernels.py": "registry.py",
        "flydsl/compiler/jit_function.py": "compiler.py",
    }.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HERE / source, path)
    for package in ("aiter", "aiter/aot", "aiter/aot/flydsl", "aiter/jit", "aiter/ops", "aiter/ops/flydsl"):
        (site / package / "__init__.py").write_text("")
    modes = "atomic" if generation is Generation.FIRST else "atomic reduce"
    (site / "aiter/ops/flydsl/modes.txt").write_text(modes)
    lookup = "topk -= int(is_ep)" if one_less else "pass"
    (site / "aiter/fused_moe.py").write_text(f"def get_2stage_cfgs(topk, is_ep):\n    {lookup}\n")
    (site / "flydsl/__init__.py").write_text(f'__version__ = "{flydsl}"\n')
    (site / "flydsl/compiler/__init__.py").write_text("")
    (site / "flydsl/utils").mkdir(exist_ok=True)
    known = "enable_cache = True" if flydsl.startswith("0.2") else "run_only = False"
    (site / "flydsl/utils/env.py").write_text(f"class Runtime:\n    {known}\n")
    for name, version in (("amd_aiter", "0.1.24"), ("flydsl", flydsl)):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        told = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (info / "METADATA").write_text(told)
    double = Double(site, generation)
    double.behave()
    return double


def tuned_row(
    tokens: int, first: str, second: str, *, topk: int, experts: int = 112, inter_dim: int = 3072
) -> list[str]:
    """A row of a shipped table, for Kimi-K3 on gfx942."""
    values = {
        **dict.fromkeys(COLUMNS, "0"), **INT4, "gfx": "gfx942", "cu_num": "304", "token": str(tokens),
        "model_dim": "3584", "inter_dim": str(inter_dim), "expert": str(experts), "topk": str(topk),
        "block_m": "16", "us1": "61.8026", "kernelName1": first, "kernelName2": second, "err1": "0.0%",
    }  # fmt: skip
    return [values[name] for name in COLUMNS]


def k3_rows() -> list[list[str]]:
    """Tuned rows as AITER ships them: those for 16 experts per token are longer than the header."""
    moe1, moe2 = "flydsl_moe1_abf16_wint4_bf16_t16x64x128", "flydsl_moe2_abf16_wint4_bf16_t16x128x256"
    return [
        *(tuned_row(1 << power, moe1, f"{moe2}_reduce", topk=15) for power in range(12)),
        *([*tuned_row(1 << power, f"{moe1}_bnt0", f"{moe2}_atomic", topk=16), "0"] for power in range(12)),
        *(
            tuned_row(1 << power, moe1, f"{moe2}_atomic", topk=16, experts=896, inter_dim=384)
            for power in range(12)
        ),
    ]
