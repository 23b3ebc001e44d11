# SPDX-License-Identifier: Apache-2.0
"""The table of shapes and kernels that AITER's entry reads.

**Which row, which topk.** With expert parallelism AITER up to ROCm/aiter#5734 looks a shape up under one
expert per token less than vLLM asks for (``topk -= int(is_ep)`` in ``get_2stage_cfgs``, aiter/fused_moe.py),
and launches the kernels that it finds with the number that vLLM asked for. FlyDSL before 0.5 counts it into
the key of a compiled kernel. So the names here are those of the row that the runtime will find, and the row
is written with the number that will be launched: a row copied as it is would be compiled and never used.

A shape without a tuned row gets the names of AITER's fallback, written out (the untuned branch for bf16 with
int4 in ``get_2stage_cfgs``): what has no row is compiled by no generation of the entry.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.files import read_small
from kimi_k3.kernels.shapes import TIERS, MoeShape
from kimi_k3.words.gpus import Gpu
from kimi_k3.words.text import printable

KEY = (
    "gfx", "cu_num", "token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype", "q_dtype_a",
    "q_dtype_w", "q_type", "use_g1u1", "doweight_stage1",
)  # fmt: skip
"""What AITER looks a row up by."""

NAMES = ("kernelName1", "kernelName2")
COLUMNS = (
    *KEY, "block_m", "ksplit", "us1", "kernelName1", "err1", "us2", "kernelName2", "err2", "us", "run_1stage",
    "xbf16", "flat", "tflops", "bw",
)  # fmt: skip
"""Those of the table that AITER ships. Its older readers use a part of them and ignore the others."""

INT4 = {
    "act_type": "ActivationType.Situv2",
    "dtype": "torch.bfloat16",
    "q_dtype_a": "torch.bfloat16",
    "q_dtype_w": "torch.int4",
    "q_type": "QuantType.per_1x32",
    "use_g1u1": "1",
    "doweight_stage1": "0",
}
"""The part of the key that is the same for all int4 experts of Kimi-K3."""

COMPILED = "flydsl_"
"""How the names of kernels begin that are compiled ahead."""

REDUCED = "_reduce"
"""How the names of second stages end that leave the sum over a token's experts to another kernel."""

MAX_TABLE_BYTES = 16 << 20
_DROPPED_TAG = "flydsl_fallback"

Key = tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One line of the table: a shape at one number of tokens.

    Attributes:
        shape: what is computed.
        tokens: the padded size of the step.
        values: by column, all of :data:`COLUMNS`.
        tuned: whether the kernels are those of a tuned table.
    """

    shape: MoeShape
    tokens: int
    values: Mapping[str, str]
    tuned: bool

    @property
    def kernels(self) -> tuple[str, ...]:
        """Kernels of this row that are compiled ahead, the first stage's first."""
        return tuple(self.values[name] for name in NAMES if self.values[name].startswith(COMPILED))


@dataclass(frozen=True)
class Tuned:
    """What a tuned table says.

    Attributes:
        rows: by key; of rows with the same key the first counts, as for AITER.
        ragged: a line for each file that has rows longer than its header.
    """

    rows: Mapping[Key, Mapping[str, str]]
    ragged: tuple[str, ...]


def read_tuned(paths: Iterable[Path]) -> Tuned:
    """Read tuned tables; rows of another length than the header are read as far as they go.

    Raises:
        OperatorError: a file cannot be read, or is no such table.
    """
    rows: dict[Key, Mapping[str, str]] = {}
    ragged = []
    for path in paths:
        header, *lines = _lines(path)
        if lacking := [name for name in (*KEY, *NAMES, "block_m") if name not in header]:
            raise _unreadable(path, f"it has no column {lacking[0]}")
        # Fields that are lacking pandas takes for empty; those that are too many it does not forgive.
        wrong = [number for number, line in enumerate(lines, 2) if len(line) > len(header)]
        if wrong:
            ragged.append(
                f"{printable(str(path))}: {len(wrong)} rows, the first on line {wrong[0]}, have more fields "
                f"than the header's {len(header)}; they are read here, but pandas, by which AITER reads the "
                f"file while serving, refuses it; make a copy without them (cut -d, -f1-{len(header)}) and "
                "set AITER_CONFIG_FMOE to that"
            )
        for line in lines:
            row = dict(zip(header, (field.strip() for field in line), strict=False))
            if row.get("_tag") != _DROPPED_TAG and all(name in row for name in (*KEY, *NAMES, "block_m")):
                rows.setdefault(tuple(row[name] for name in KEY), row)
    return Tuned(rows, tuple(ragged))


def kernel_rows(
    shapes: Sequence[MoeShape], gpu: Gpu, tuned: Mapping[Key, Mapping[str, str]], *, one_less: bool
) -> list[Row]:
    """The rows to compile.

    Args:
        shapes: of the deployment's ranks.
        gpu: what they run on.
        tuned: rows that AITER will look up, see :class:`Tuned`.
        one_less: whether this AITER looks masked shapes up under one expert less (see above).
    """
    return [_row(shape, tokens, gpu, tuned, one_less=one_less) for shape in shapes for tokens in shape.tokens]


def as_csv(rows: Iterable[Row]) -> str:
    """The rows as AITER reads them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([row.values[name] for name in COLUMNS])
    return text.getvalue()


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Write a table, whole or not at all, and read it back.

    Raises:
        OperatorError: it cannot be written, or what was written is not what should be.
    """
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(as_csv(rows))
            file.flush()
            os.fsync(file.fileno())
        _require_rows(Path(temporary), rows)
        # mkstemp gives 0600; whoever builds an image is not who serves.
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
        temporary = None
    except OSError as error:
        raise OperatorError(
            printable(f"table {path}: cannot be written ({error.strerror or error})"),
            remedy="free some space, or name a directory that you may write to",
        ) from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


def _require_rows(path: Path, rows: Sequence[Row]) -> None:
    found = _lines(path)
    wanted = [list(COLUMNS), *([row.values[name] for name in COLUMNS] for row in rows)]
    if found != wanted or any(len(line) != len(COLUMNS) for line in found):
        raise _unreadable(path, "what was read back is not what was written")


def _row(
    shape: MoeShape, tokens: int, gpu: Gpu, tuned: Mapping[Key, Mapping[str, str]], *, one_less: bool
) -> Row:
    asked = {
        **dict.fromkeys(COLUMNS, "0"),
        "gfx": gpu.architecture,
        "cu_num": str(gpu.compute_units),
        "token": str(tokens),
        "model_dim": str(shape.model_dim),
        "inter_dim": str(shape.inter_dim),
        "expert": str(shape.experts),
        "topk": str(shape.topk),
        **INT4,
    }
    found = _lookup(asked, tuned, topk=shape.topk - (one_less and shape.masked))
    if found is not None:
        values = {name: found.get(name, "0") for name in COLUMNS} | {name: asked[name] for name in KEY}
        return Row(shape, tokens, values, tuned=True)
    return Row(shape, tokens, asked | _fallback(tokens), tuned=False)


def _lookup(
    asked: Mapping[str, str], tuned: Mapping[Key, Mapping[str, str]], *, topk: int
) -> Mapping[str, str] | None:
    tokens = int(asked["token"])
    # Beyond the first tier AITER takes a smaller one's row, and nowhere else.
    for size in (tokens, *(tier for tier in reversed(TIERS) if TIERS[0] <= tier < tokens)):
        key = {**asked, "token": str(size), "topk": str(topk)}
        if (found := tuned.get(tuple(key[name] for name in KEY))) is not None:
            return found
    return None


def _fallback(tokens: int) -> dict[str, str]:
    tile = 16 if tokens < 2048 else 32 if tokens < 16384 else 64
    return {
        # AITER sorts tokens by it and computes with the tile: they must be the same.
        "block_m": str(tile),
        "kernelName1": f"flydsl_moe1_abf16_wint4_bf16_t{tile}x128x128",
        "kernelName2": f"flydsl_moe2_abf16_wint4_bf16_t{tile}x128x128_atomic",
    }


def _lines(path: Path) -> list[list[str]]:
    try:
        text = read_small(path, limit=MAX_TABLE_BYTES).decode("utf-8")
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise _unreadable(path, "it is not UTF-8") from None
    try:
        lines = [line for line in csv.reader(io.StringIO(text, newline=""), strict=True) if line]
    except csv.Error as error:
        raise _unreadable(path, str(error)) from None
    if not lines:
        raise _unreadable(path, "it is empty")
    # Python's csv writes a lone carriage return without quotes, and reads it as the end of a row.
    if not all(field.isprintable() for line in lines for field in line):
        raise _unreadable(path, "a field has characters that cannot be printed")
    return lines


def _unreadable(path: Path, why: str) -> OperatorError:
    return OperatorError(
        printable(f"table {path}: cannot be used ({why})"),
        remedy="install AITER again, or correct AITER_CONFIG_FMOE",
        exit_code=ExitCode.USAGE,
    )
