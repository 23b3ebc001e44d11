# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 convert-file``: its bits against AITER's, and every way its files can be wrong."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kimi_k3.cli import run
from kimi_k3.conversion.files.models import FileReport
from tests.reference import int4 as reference

GOLDEN = Path(__file__).parents[2] / "reference" / "data"
PLAIN_MSE = ("--rule", "mse", "--layout", "plain")


def experts(experts: int = 2, rows: int = 16, groups: int = 4, seed: int = 0) -> dict[str, Any]:
    """Random arrays under the names that the command reads."""
    generator = np.random.default_rng(seed)
    return {
        "mxfp4_packed": generator.integers(0, 256, (experts, rows, 16 * groups), dtype=np.uint8),
        "e8m0": generator.integers(100, 130, (experts, rows, groups), dtype=np.uint8),
    }


def write(path: Path, **changes: Any) -> Path:
    """An npz file of random experts; a change to None leaves an array out."""
    np.savez(path, **{name: array for name, array in (experts() | changes).items() if array is not None})
    return path


@pytest.mark.parametrize("name", ["amax_small", "amax_all_exponents"])
def test_amax_in_aiters_layout_is_aiters_output(tmp_path: Path, name: str) -> None:
    """What the command is for: the very bytes and scales that AITER's kernels read, NaN included."""
    out = tmp_path / "out.npz"
    arguments = ["--rule", "amax", "--layout", "aiter", "--allow-nonfinite"]
    assert run(["convert-file", str(GOLDEN / f"{name}.npz"), str(out), *arguments]) == 0
    with np.load(GOLDEN / f"{name}.npz") as golden, np.load(out, allow_pickle=False) as converted:
        np.testing.assert_array_equal(converted["packed"], golden["packed_shuffled"])
        np.testing.assert_array_equal(converted["scale_bits"], golden["scale_shuffled_bf16_bits"])
        assert converted["packed"].dtype == np.uint8
        assert converted["scale_bits"].dtype == np.uint16


@pytest.mark.parametrize("rule", ["mse", "amax"])
def test_the_report_equals_the_independent_reference(tmp_path: Path, rule: reference.Rule) -> None:
    """Scripts compare losses too, so each expert's figures and their sum must be those of the definition."""
    source, out = write(tmp_path / "in.npz"), tmp_path / "out.npz"
    assert run(["convert-file", str(source), str(out), "--rule", rule, "--layout", "plain"]) == 0
    with np.load(out) as converted:
        report = FileReport.model_validate_json(str(converted["report"]))
        scale_bits = converted["scale_bits"]
    given = experts()
    pairs = zip(given["mxfp4_packed"], given["e8m0"], strict=True)
    matrices, losses = zip(*(reference.requantise(*pair, rule) for pair in pairs), strict=True)
    np.testing.assert_array_equal(scale_bits, np.stack([matrix.scale_bits for matrix in matrices]).ravel())
    for found, loss in zip(report.experts, losses, strict=True):
        assert (found.groups, found.lossless_groups) == (loss.groups, loss.lossless)
        assert found.squared_error == pytest.approx(loss.squared_error, rel=1e-12)
        assert found.energy == pytest.approx(loss.energy, rel=1e-12)
        assert found.max_error == loss.max_abs_error
        assert found.relative_mse == pytest.approx(loss.relative_mse, rel=1e-12)
    assert report.total.groups == sum(loss.groups for loss in losses)
    assert (report.requantisation.rule, report.requantisation.negative_scale) == (rule, rule == "mse")
    assert (report.layout, report.device) == ("plain", "cpu")


def test_without_negative_scales_none_is_negative(tmp_path: Path) -> None:
    """A kernel that cannot take them is served by this flag alone."""
    source, out = write(tmp_path / "in.npz"), tmp_path / "out.npz"
    signs = []
    for flags in ([], ["--no-negative-scale"]):
        assert run(["convert-file", str(source), str(out), *PLAIN_MSE, *flags]) == 0
        with np.load(out) as converted:
            signs.append(bool((converted["scale_bits"] >> 15).any()))
    assert signs == [True, False]


def _truncated(path: Path) -> None:
    path.write_bytes(write(path.with_name("whole.npz")).read_bytes()[:-100])


def _damaged(path: Path) -> None:
    raw = bytearray(write(path).read_bytes())
    raw[300] ^= 1
    path.write_bytes(raw)


def _not_an_array(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mxfp4_packed", b"text")
        archive.writestr("e8m0", b"text")


def _writes(**changes: Any) -> Callable[[Path], object]:
    return lambda path: write(path, **changes)


def _nan_at(expert: int, row: int, group: int) -> Any:
    e8m0 = experts()["e8m0"]
    e8m0[expert, row, group] = 255
    return e8m0


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda path: None, "cannot be read (No such file or directory)"),
        (Path.mkdir, "it is a directory, not a regular file"),
        (os.mkfifo, "it is a FIFO"),
        (Path.touch, "is not an npz file"),
        (lambda path: path.write_text("text"), "is not an npz file"),
        (lambda path: np.save(path.open("wb"), experts()["e8m0"]), "is not an npz file"),
        (_truncated, "is not an npz file"),
        (_damaged, "is damaged (Bad CRC-32"),
        (_not_an_array, "array mxfp4_packed is no array, expected uint8"),
        (_writes(e8m0=None), "has no array e8m0 (it has: mxfp4_packed)"),
        (_writes(e8m0=np.array([None])), "is damaged (Object arrays cannot be loaded"),
        (_writes(mxfp4_packed=np.zeros((2, 16, 64), np.int8)), "array mxfp4_packed is int8, expected uint8"),
        (_writes(e8m0=np.zeros((16, 4), np.uint8)), "array e8m0 has shape [16, 4], expected three axes"),
        (
            _writes(e8m0=np.zeros((2, 16, 0), np.uint8)),
            "array e8m0 has shape [2, 16, 0], expected three axes",
        ),
        (_writes(e8m0=np.zeros((2, 16, 5), np.uint8)), "[2, 16, 64] and e8m0 [2, 16, 5] do not belong"),
        (_writes(e8m0=_nan_at(1, 3, 2)), "expert 1, row 3, group 2 is NaN (E8M0 scale 255)"),
    ],
)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_wrong_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object], part: str
) -> None:
    """It names the file and what to do, and leaves nothing where the output would be."""
    source, out = tmp_path / "in.npz", tmp_path / "out.npz"
    make(source)
    assert run(["convert-file", str(source), str(out), *PLAIN_MSE]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"kimi-k3: error: {source}: ")
    assert part in error
    assert error.count("\n") == 1
    assert not [path for path in tmp_path.iterdir() if "out.npz" in path.name]


def test_a_group_that_is_not_finite_can_be_allowed(tmp_path: Path) -> None:
    """The remedy that the message names must work, and count the group."""
    source, out = write(tmp_path / "in.npz", e8m0=_nan_at(1, 3, 2)), tmp_path / "out.npz"
    assert run(["convert-file", str(source), str(out), *PLAIN_MSE, "--allow-nonfinite"]) == 0
    with np.load(out) as converted:
        report = json.loads(str(converted["report"]))
    assert [expert["nonfinite_groups"] for expert in report["experts"]] == [0, 1]


@pytest.mark.parametrize(
    ("rows", "groups", "part"), [(8, 4, "8 rows and 128 columns"), (16, 3, "16 rows and 96 columns")]
)
def test_a_shape_that_the_layout_cannot_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: int, groups: int, part: str
) -> None:
    """AITER's shuffle would not fail but mix up rows."""
    source = write(tmp_path / "in.npz", **experts(rows=rows, groups=groups))
    assert run(["convert-file", str(source), str(tmp_path / "o"), "--rule", "mse", "--layout", "aiter"]) == 1
    error = capsys.readouterr().err
    assert part in error
    assert "use --layout plain" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has such a device")
def test_without_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A parity script on the wrong machine must not compare the CPU with itself."""
    source = write(tmp_path / "in.npz")
    assert run(["convert-file", str(source), str(tmp_path / "o"), *PLAIN_MSE, "--device", "cuda"]) == 1
    assert "--device cuda: torch sees no CUDA or ROCm device; " in capsys.readouterr().err


def test_a_device_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver's error is one line for the operator; torch adds a page for its developers."""

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", fail)
    source = write(tmp_path / "in.npz")
    assert run(["convert-file", str(source), str(tmp_path / "o"), *PLAIN_MSE, "--device", "cuda"]) == 1
    error = capsys.readouterr().err
    assert "--device cuda: CUDA error: no kernel image is available; check the driver" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("link", [False, True])
def test_the_input_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str], link: bool) -> None:
    """One slip of the shell's history would cost the only copy of what was compared."""
    source = write(tmp_path / "in.npz")
    out, before = source, source.read_bytes()
    if link:
        out = tmp_path / "link.npz"
        out.hardlink_to(source)
    assert run(["convert-file", str(source), str(out), *PLAIN_MSE]) == 2
    assert "is not a result of convert-file, and is not replaced" in capsys.readouterr().err
    assert source.read_bytes() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.parametrize("rule", ["mse", "amax"])
def test_a_device_writes_the_same(tmp_path: Path, rule: str) -> None:
    """Bytes are equal; sums over exponents that are this far apart may be an ulp off."""
    source, bits, totals = write(tmp_path / "in.npz"), [], []
    for device in ("cpu", "cuda"):
        out, arguments = tmp_path / device, ["--rule", rule, "--layout", "aiter", "--device", device]
        assert run(["convert-file", str(source), str(out), *arguments]) == 0
        with np.load(out) as converted:
            bits.append((converted["packed"].tobytes(), converted["scale_bits"].tobytes()))
            totals.append(FileReport.model_validate_json(str(converted["report"])).total.model_dump())
    assert bits[0] == bits[1]
    assert totals[0] == pytest.approx(totals[1], rel=1e-14)


def test_an_output_that_has_no_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything is converted."""
    source = write(tmp_path / "in.npz")
    assert run(["convert-file", str(source), str(tmp_path / "no" / "out.npz"), *PLAIN_MSE]) == 2
    assert f"there is no directory {tmp_path / 'no'}; " in capsys.readouterr().err
    assert run(["convert-file", str(source), str(tmp_path), *PLAIN_MSE]) == 2
    assert "is a directory; " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["convert-file", "convert-report"])
@pytest.mark.parametrize("name", ["model-00001-of-000002.safetensors", "config.json", "notes.txt"])
def test_files_of_others_are_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    """One slip of the shell's completion would cost a shard that took an hour to download."""
    source, precious = write(tmp_path / "in.npz"), tmp_path / name
    precious.write_text('{"architectures": ["KimiK3ForConditionalGeneration"]}')
    arguments = (
        [str(source), str(precious), *PLAIN_MSE]
        if command == "convert-file"
        else [str(tmp_path), "--json", str(precious)]
    )
    assert run([command, *arguments]) == 2
    error = capsys.readouterr().err
    assert f"{precious}: is not a result of {command}, and is not replaced" in error
    assert error.count("\n") == 1
    assert precious.read_text().startswith('{"architectures"')


@pytest.mark.parametrize("command", ["convert-file", "convert-report"])
def test_a_name_that_no_file_system_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Found while looking whether the place is free, so it must not be a traceback."""
    source, long = write(tmp_path / "in.npz"), str(tmp_path / ("a" * 300))
    arguments = (
        [str(source), long, *PLAIN_MSE] if command == "convert-file" else [str(tmp_path), "--json", long]
    )
    assert run([command, *arguments]) == 1
    assert "cannot be written (File name too long)" in capsys.readouterr().err


def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    """A job that is cancelled must not fill the disk with hidden halves."""
    source = write(tmp_path / "in.npz")
    code = f"""
import os, signal, sys
import numpy as np
from kimi_k3.cli import main
save = np.savez
def save_and_die(stream, **arrays):
    save(stream, **arrays)
    os.kill(os.getpid(), signal.SIGTERM)
np.savez = save_and_die
sys.argv[1:] = {["convert-file", str(source), str(tmp_path / "out.npz"), *PLAIN_MSE]!r}
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 143
    assert done.stderr == "kimi-k3: ended by SIGTERM\n"
    assert [path.name for path in tmp_path.iterdir()] == ["in.npz"]


def _only_small_files() -> None:
    """Files end after 1000 bytes, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


def test_an_output_that_cannot_be_finished(tmp_path: Path) -> None:
    """What stood under the name before stays whole, and no part of the new file stays."""
    source = tmp_path / "in.npz"
    write(source, **experts(experts=1, rows=1, groups=1))
    out = tmp_path / "out.npz"
    assert run(["convert-file", str(source), str(out), *PLAIN_MSE]) == 0
    before = out.read_bytes()
    # In a process of its own, since the limit would hold for the test run's own output, too.
    done = subprocess.run(
        [sys.executable, "-m", "kimi_k3", "convert-file", source, out, *PLAIN_MSE],
        preexec_fn=_only_small_files,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"{out} cannot be written (File too large); free some space" in done.stderr
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz", "out.npz"]
