# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 convert-report``: its figures, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors import safe_open

from kimi_k3.checkpoint import read_shard
from kimi_k3.checkpoint.headers import LENGTH_BYTES
from kimi_k3.checkpoint.index import INDEX_NAME
from kimi_k3.checkpoint.layout import expert_prefix
from kimi_k3.checkpoint.tiny_files import model_config
from kimi_k3.cli import run
from kimi_k3.conversion.files.report import open_experts, parse_layers
from kimi_k3.conversion.files.view import percent, ranges
from kimi_k3.errors import OperatorError
from kimi_k3.words.weights import Projection
from tests.checkpoint.imitation import PUBLISHED_CONFIG, write_imitation, write_small
from tests.reference import int4 as reference

from .reports import LAYERS, reported

pytestmark = pytest.mark.usefixtures("own_cache")

PEAK_KIB = 300 << 10
"""Three quarters of it are Python with pydantic, numpy and numba, and what numba needs to compile."""


def independent_losses(
    directory: Path, rule: reference.Rule
) -> dict[tuple[int, str], dict[int, list[reference.Loss]]]:
    """Per layer, served projection and expert the losses of w1 and w3, or of w2."""
    index = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
    opened: dict[str, Any] = {
        shard: safe_open(directory / shard, framework="numpy") for shard in set(index.values())
    }
    found: dict[tuple[int, str], dict[int, list[reference.Loss]]] = {}
    for name, shard in index.items():
        if name.endswith(".weight_packed"):
            scale = name.replace("_packed", "_scale")
            e8m0 = opened[index[scale]].get_tensor(scale)
            _, loss = reference.requantise(opened[shard].get_tensor(name), e8m0, rule)
            parts = name.split(".")
            key = (int(parts[3]), "w2" if parts[7] == "w2" else "w13")
            found.setdefault(key, {}).setdefault(int(parts[6]), []).append(loss)
    return found


@pytest.mark.parametrize("rule", ["mse", "amax"])
def test_figures_equal_the_independent_reference(tiny: Path, tmp_path: Path, rule: reference.Rule) -> None:
    """An operator decides by these, so they are recomputed by code that shares none with them."""
    report = reported(tiny, tmp_path / "r.json", "--rule", rule)
    expected = independent_losses(tiny, rule)
    assert report.layers == tuple(range(1, LAYERS + 1))
    assert [(part.layer, part.projection) for part in report.projections] == sorted(expected)
    for part in report.projections:
        experts = expected[part.layer, part.projection]
        losses = [loss for parts in experts.values() for loss in parts]
        assert part.experts == len(experts) == 16
        assert part.loss.groups == sum(loss.groups for loss in losses)
        assert part.loss.lossless_groups == sum(loss.lossless for loss in losses)
        assert part.loss.nonfinite_groups == 0
        assert part.loss.squared_error == _sum(loss.squared_error for loss in losses)
        assert part.loss.energy == _sum(loss.energy for loss in losses)
        assert part.loss.max_error == max(loss.max_abs_error for loss in losses)
        assert part.bytes_mxfp4 == 17 * part.loss.groups
        assert part.bytes_int4 == 18 * part.loss.groups
        assert part.worst_expert is not None
        relative = {
            expert: sum(loss.squared_error for loss in parts) / sum(loss.energy for loss in parts)
            for expert, parts in experts.items()
        }
        assert part.worst_expert.expert == max(relative, key=relative.__getitem__)
        assert part.worst_expert.relative_mse == pytest.approx(max(relative.values()), rel=1e-14)
    every = [loss for experts in expected.values() for parts in experts.values() for loss in parts]
    assert report.total.groups == sum(loss.groups for loss in every)
    assert report.total.zero_groups == 24
    assert report.total.squared_error == _sum(loss.squared_error for loss in every)
    assert report.bytes_int4 == 18 * report.total.groups
    assert sum(part.groups for part in report.totals.values()) == report.total.groups


def _sum(values: Iterable[float]) -> Any:
    """Correctly rounded, and equal to what was rounded once more on the way."""
    return pytest.approx(math.fsum(values), rel=1e-14)


def test_plain_lines_without_a_terminal(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Output that is piped must be greppable, and progress must not mix with it."""
    assert run(["convert-report", str(tiny), "--layers", "2,4-5"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert f"checkpoint: {tiny}" in lines
    assert "layers: 2,4-5" in lines
    assert "nonfinite groups: 0 (0 %)" in lines
    header = next(line for line in lines if line.startswith("layer "))
    table = lines[lines.index(header) :]
    assert len(table) == 1 + 2 * 3
    assert {len(line) for line in table} == {len(header)}
    assert [line.split(":")[1] for line in err.splitlines()] == [
        f" layer {layer} ({number} of 3)" for number, layer in enumerate((2, 4, 5), start=1)
    ]


def test_a_table_on_a_terminal(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eighty columns are what a terminal has at least, and a figure that is cut is worse than none."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Console, "is_terminal", True)
    assert run(["convert-report", str(tiny), "--layers", "1"]) == 0
    out, err = capsys.readouterr()
    assert "\u2026" not in out
    assert "0.004502" in out
    assert "1 of 1 layers" in err


def test_it_leaves_nothing_behind(tiny: Path, tmp_path: Path) -> None:
    """Progress that is complete would only be mistaken for another report's."""
    reported(tiny, tmp_path / "r.json", "--layers", "1")
    assert run(["convert-report", str(tiny), "--layers", "1"]) == 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["r.json"]


@pytest.mark.parametrize(
    ("given", "known", "chosen"),
    [
        ("1", (1, 2, 3), (1,)),
        ("3,1", (1, 2, 3), (1, 3)),
        ("1-3,2", (1, 2, 3), (1, 2, 3)),
        (" 1 - 2 , 3 ", (1, 2, 3), (1, 2, 3)),
        ("1-5", (1, 3, 5), (1, 3, 5)),
    ],
)
def test_layers(given: str, known: tuple[int, ...], chosen: tuple[int, ...]) -> None:
    """Each once and in order; a dense layer inside a range is no mistake."""
    assert parse_layers(given, known) == chosen


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("", "'' is no layer; write numbers and ranges"),
        ("1,", "'' is no layer"),
        ("one", "'one' is no layer"),
        ("-1", "'-1' is no layer"),
        ("1-2-3", "'1-2-3' is no layer"),
        ("\u0661", "is no layer"),
        ("1" * 5000, "is no layer"),
        ("3-1", "'3-1' ends before it begins; write 1-3"),
        ("0-3", "layer 0 has no routed experts; use 1-3 (layers with experts: 1-7)"),
        ("5-999999999", "layer 999999999 has no routed experts; use 5-7 (layers"),
        ("0", "layer 0 has no routed experts; use 1 (layers with experts: 1-7)"),
        ("9", "layer 9 has no routed experts; use 7 (layers"),
    ],
)
def test_layers_that_are_not_there(given: str, part: str) -> None:
    """The message says what would have been right."""
    with pytest.raises(OperatorError) as caught:
        parse_layers(given, range(1, 8))
    assert part in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.fixture
def damaged(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint with a NaN in layer 3, expert 5, row 7, group 2 of w3."""
    directory = tmp_path / "damaged"
    shutil.copytree(tiny, directory)
    name = f"{expert_prefix(3, 5)}.w3.weight_scale"
    shard = directory / json.loads((directory / INDEX_NAME).read_text())["weight_map"][name]
    header = read_shard(shard)
    tensor = next(tensor for tensor in header.tensors if tensor.name == name)
    with shard.open("r+b") as file:
        file.seek(LENGTH_BYTES + header.header_bytes + tensor.start + 7 * tensor.shape[1] + 2)
        file.write(b"\xff")
    return directory


def test_a_group_that_is_not_finite(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named as it is served, where w3 comes after w1's rows, and as it stands on disk."""
    assert run(["convert-report", str(damaged), "--json", str(tmp_path / "r.json")]) == 4
    error = capsys.readouterr().err.splitlines()[-1]
    rows = model_config()["text_config"]["moe_intermediate_size"]
    assert f"layer 3, w13, expert 5, row {rows + 7}, group 2 is NaN (E8M0 scale 255): row 7 of " in error
    assert f"{expert_prefix(3, 5)}.w3.weight_scale in model-0000" in error
    assert "--allow-nonfinite" in error
    # Another choice is another report, so nothing of the strict one is taken over.
    report = reported(damaged, tmp_path / "r.json", "--allow-nonfinite", "--layers", "3")
    assert [part.loss.nonfinite_groups for part in report.projections] == [1, 0]


def test_a_download_that_goes_on(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers that are there can be looked at before the rest is; the whole cannot."""
    directory = tmp_path / "going-on"
    shutil.copytree(tiny, directory)
    last = sorted(directory.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    part = reported(directory, tmp_path / "r.json", "--layers", "1-2")
    assert part.projections == reported(tiny, tmp_path / "s.json", "--layers", "1-2").projections
    capsys.readouterr()
    for flags, what in (([], "is truncated"), (["--layers", "7"], f"{last} is truncated")):
        assert run(["convert-report", str(directory), *flags]) == 4
        assert what in capsys.readouterr().err
    last.unlink()
    for flags, what in (([], "lacks 1 of 3 shards"), (["--layers", "7"], f"{last} cannot be read")):
        assert run(["convert-report", str(directory), *flags]) == 4
        assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda path: os.truncate(path, 100_000), "is truncated (100,000 of at least "),
        (Path.unlink, "cannot be read (No such file or directory)"),
    ],
)
def test_a_shard_that_is_spoilt_meanwhile(tmp_path: Path, spoil: Callable[[Path], object], what: str) -> None:
    """Hours pass between the look at the headers and the last read."""
    (tmp_path / "small").mkdir()
    directory = write_small(tmp_path / "small")
    files = open_experts(directory, "1")
    shard = min(directory.glob("*.safetensors"))
    spoil(shard)
    with pytest.raises(OperatorError, match=re.escape(f"{shard} {what}")) as caught:
        list(files.batches(1, Projection.W13))
    assert caught.value.exit_code == 4


def test_one_shard_without_an_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such checkpoints are servable too; and weights that are all zero have no relative error at all."""
    directory = tmp_path / "single"
    directory.mkdir()
    write_imitation(directory, json.dumps(model_config()), 1)
    (directory / INDEX_NAME).unlink()
    next(directory.glob("*.safetensors")).rename(directory / "model.safetensors")
    report = reported(directory, tmp_path / "r.json")
    assert report.total.relative_mse is None
    assert report.total.zero_groups == report.total.lossless_groups == report.total.groups
    assert "worst expert: none, every weight is zero" in capsys.readouterr().out


def test_a_config_that_calls_for_other_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A partial look must refuse it as a whole one does, not read other bytes than it thinks."""
    (tmp_path / "small").mkdir()
    directory = write_small(tmp_path / "small")
    for change, what in (
        ({"num_experts": 17}, "lacks 6 tensors of routed experts (first "),
        ({"moe_intermediate_size": 64}, "expected U8 [64, 64]"),
    ):
        config = model_config()
        config["text_config"] |= change
        (directory / "config.json").write_text(json.dumps(config))
        assert run(["convert-report", str(directory), "--layers", "2"]) == 4
        assert what in capsys.readouterr().err


def test_memory_at_the_published_size_of_an_expert(tmp_path: Path) -> None:
    """Half a gigabyte passes through; what is resident depends on the batch, not on the layer."""
    config = json.loads(PUBLISHED_CONFIG.read_text())
    config["text_config"] |= {"num_hidden_layers": 2, "num_experts": 32}
    config["vision_config"] = None
    write_imitation(tmp_path, json.dumps(config), 1)
    code = f"""
from kimi_k3.cli import run
assert run(["convert-report", {str(tmp_path)!r}]) == 0
import sys
assert "torch" not in sys.modules
# Not getrusage: its peak is also that of the process that started this one.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "bytes in MXFP4: 561,512,448 (535.5 MiB)" in done.stdout
    assert int(done.stdout.split()[-1]) < PEAK_KIB


def test_percentages() -> None:
    """What is there is never shown as 0, and what is not all never as 100."""
    assert [percent(count, 10**6) for count in (0, 1, 123_456, 999_999, 10**6)] == [
        "0",
        "<0.001",
        "12.3",
        "99.9",
        "100",
    ]


def test_ranges() -> None:
    """As they can be given to the command."""
    assert ranges((0, 1, 2, 3, 7)) == "0-3,7"
    assert parse_layers(ranges((1, 2, 5)), range(9)) == (1, 2, 5)
