# SPDX-License-Identifier: Apache-2.0
"""The table: whose kernels, which topk, and never ragged."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.errors import OperatorError
from kimi_k3.kernels.shapes import MoeShape, moe_shapes
from kimi_k3.kernels.table import COLUMNS, KEY, as_csv, kernel_rows, read_tuned, write_table
from kimi_k3.profiles.load import load_profile
from kimi_k3.words.gpus import GPUS

from ..checkpoint.imitation import published_config
from .doubles import Generation, install, k3_rows, tuned_row

GPU = GPUS["mi325x"]
TEXT = published_config().text_config
(EP8,) = moe_shapes(TEXT, load_profile("ep8"))
(TP8,) = moe_shapes(TEXT, load_profile("tp8"))


def shipped(tmp_path: Path) -> Path:
    return install(tmp_path / "site", Generation.SECOND).ship(k3_rows())


def test_a_ragged_table_is_read_and_told(tmp_path: Path) -> None:
    """As AITER's own file for Kimi-K3 is, which pandas refuses: no row is lost, and it is told."""
    path = shipped(tmp_path)
    tuned = read_tuned([path])
    assert len(tuned.rows) == 36
    (line,) = tuned.ragged
    assert f"{path}: 12 rows, the first on line 14" in line
    assert "cut -d, -f1-28" in line


def test_a_table_of_equal_rows(tmp_path: Path) -> None:
    """Nothing to tell of one that somebody repaired."""
    path = install(tmp_path / "site", Generation.SECOND).ship(row[: len(COLUMNS)] for row in k3_rows())
    assert read_tuned([path]).ragged == ()


@pytest.mark.parametrize(("one_less", "ending"), [(True, "_reduce"), (False, "_atomic")])
def test_the_row_that_is_found_with_the_number_that_is_launched(
    tmp_path: Path, one_less: bool, ending: str
) -> None:
    """With expert parallelism AITER may look up 15 and launch 16: a compiled 15 would never be used."""
    tuned = read_tuned([shipped(tmp_path)]).rows
    rows = kernel_rows([EP8], GPU, tuned, one_less=one_less)
    assert {row.values["topk"] for row in rows} == {"16"}
    assert [row.kernels[1].endswith(ending) for row in rows if row.tuned] == [True] * 12


def test_slices_are_looked_up_as_they_are(tmp_path: Path) -> None:
    """Without expert parallelism nothing is taken off."""
    rows = kernel_rows([TP8], GPU, read_tuned([shipped(tmp_path)]).rows, one_less=True)
    assert [row.tuned for row in rows] == [True] * 12 + [False]


def test_what_has_no_row_gets_aiters_fallback() -> None:
    """Else no generation of the entry would compile it; sorting and computing must use the same tile."""
    for row in kernel_rows([EP8], GPU, {}, one_less=False):
        tile = 16 if row.tokens < 2048 else 32
        assert row.values["block_m"] == str(tile)
        assert row.kernels == (
            f"flydsl_moe1_abf16_wint4_bf16_t{tile}x128x128",
            f"flydsl_moe2_abf16_wint4_bf16_t{tile}x128x128_atomic",
        )


def test_the_first_of_two_equal_rows_counts(tmp_path: Path) -> None:
    """As for AITER."""
    rows = [
        tuned_row(1, f"flydsl_{name}", "flydsl_x", topk=16, experts=896, inter_dim=384) for name in ("a", "b")
    ]
    tuned = read_tuned([install(tmp_path / "site", Generation.SECOND).ship(rows)]).rows
    assert kernel_rows([TP8], GPU, tuned, one_less=False)[0].kernels[0] == "flydsl_a"


def test_beyond_the_first_tier_a_smaller_row_counts(tmp_path: Path) -> None:
    """As for AITER, from 131072 down to 32768, and not further."""
    rows = [
        tuned_row(each, f"flydsl_{each}", "flydsl_x", topk=16, experts=896, inter_dim=384)
        for each in (16384, 32768)
    ]
    tuned = read_tuned([install(tmp_path / "site", Generation.SECOND).ship(rows)]).rows
    shape = MoeShape(model_dim=3584, inter_dim=384, experts=896, topk=16, masked=False, tokens=(8192, 131072))
    small, large = kernel_rows([shape], GPU, tuned, one_less=False)
    assert not small.tuned
    assert large.kernels[0] == "flydsl_32768"
    assert large.values["token"] == "131072"


@given(st.lists(st.lists(st.text(st.characters().filter(str.isprintable)), max_size=30), max_size=3))
def test_never_ragged(lines: list[list[str]]) -> None:
    """Whatever a tuned row holds, what is written has the header's fields and unique keys."""
    tuned = {
        tuple(tuned_row(1, "", "", topk=16, experts=896, inter_dim=384)[: len(KEY)]): dict(
            zip(COLUMNS, [*line, *["0"] * 28], strict=False)
        )
        for line in lines
    }
    text = as_csv(kernel_rows([TP8, EP8], GPU, tuned, one_less=True))
    header, *rows = csv.reader(io.StringIO(text, newline=""))
    assert tuple(header) == COLUMNS
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert len({tuple(row[: len(KEY)]) for row in rows}) == len(rows)


def test_a_table_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Half a table would compile half of the kernels, without a word."""
    with pytest.raises(OperatorError, match="cannot be written"):
        write_table(tmp_path / "no" / "table.csv", [])
    write_table(tmp_path / "table.csv", kernel_rows([EP8], GPU, {}, one_less=False))
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"a,b\n1,2\n", "it has no column gfx"),
        (b"\xff\n", "it is not UTF-8"),
        (b'gfx,"a\rb"\n', "cannot be printed"),
        (b'"a', "unexpected end"),
        (None, "No such file"),
    ],
)
def test_a_table_that_is_none(tmp_path: Path, content: bytes | None, why: str) -> None:
    """AITER_CONFIG_FMOE may name anything."""
    path = tmp_path / "tuned.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OperatorError, match=why):
        read_tuned([path])
