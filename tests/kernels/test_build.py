# SPDX-License-Identifier: Apache-2.0
"""Building and checking, with doubles that parse the table and write a cache as each generation does."""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.kernels.command import Request, run_build, run_check
from kimi_k3.kernels.entry import environment_of_entry, worker_count
from kimi_k3.kernels.installed import find_aiter
from kimi_k3.kernels.table import COLUMNS
from kimi_k3.kernels.wanted import MASKED_REDUCTION, built_directory, default_cache
from kimi_k3.words.gpus import GPUS
from tests.surroundings import SURROUNDINGS

from .doubles import Double, Generation, install, k3_rows

ENVIRONMENT = {**SURROUNDINGS, "AITER_FLYDSL_AOT_WORKERS": "4"}


def request(checkpoint: Path, profile: str = "tp8", *, arch: str = "gfx942", as_json: bool = True) -> Request:
    return Request(
        checkpoint=checkpoint,
        profile=profile,
        arch=arch,
        cache=checkpoint.parent / "cache",
        as_json=as_json,
    )


def built(
    double: Double, asked: Request, capsys: pytest.CaptureFixture[str], **more: Any
) -> tuple[int, dict[str, Any]]:
    environment = {**ENVIRONMENT, **more}
    code = run_build(asked, environment=environment, search=(str(double.site),))
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


def checked(
    double: Double, asked: Request, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any], Counter[str]]:
    code = run_check(asked, environment=ENVIRONMENT, search=(str(double.site),))
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document, Counter(kernel["state"] for kernel in document["kernels"])


def compiled(directory: str) -> list[list[Any]]:
    """What the doubles' compiler wrote about each kernel."""
    return [json.loads(path.read_text()) for path in Path(directory).glob("*/*.pkl")]


def test_a_build_and_its_check(double: Double, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything is compiled for gfx942, and found again; before it everything is missing."""
    asked = request(checkpoint)
    code, _, states = checked(double, asked, capsys)
    assert (code, set(states)) == (ExitCode.FAILED, {"missing"})
    code, report = built(double, asked, capsys)
    assert (code, report["state"], report["failures"]) == (ExitCode.OK, "built", [])
    assert {kernel[4] for kernel in compiled(report["directory"])} == {"gfx942"}
    code, found, states = checked(double, asked, capsys)
    assert (code, set(states), found["state"]) == (ExitCode.OK, {"present"}, "present")
    assert states["present"] == report["kernels"]


@pytest.mark.parametrize("flydsl", ["0.4.2", "0.5.0"])
@pytest.mark.parametrize("generation", [Generation.SECOND, Generation.THIRD])
def test_expert_parallelism(
    tmp_path: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    generation: Generation,
    flydsl: str,
) -> None:
    """Compiled for 16 experts, by the row for 15; what nobody compiles or looks for is never present."""
    double = install(tmp_path / "site", generation, flydsl=flydsl)
    double.ship(k3_rows())
    asked = request(checkpoint, "ep8")
    code, report = built(double, asked, capsys)
    assert (code, report["failures"]) == (ExitCode.OK, [])
    kernels = compiled(report["directory"])
    assert {kernel[3]["topk"] for kernel in kernels if kernel[3]} == {16}
    assert any(kernel[1].endswith("_reduce") for kernel in kernels)
    assert any("looks shapes up for 15" in note for note in report["notes"])
    code, found, states = checked(double, asked, capsys)
    assert code == ExitCode.FAILED
    assert [kernel["kernel"] for kernel in found["kernels"] if kernel["state"] != "present"] == [
        MASKED_REDUCTION
    ]
    assert (states["unknown"], found["state"]) == (1, "unknown")


def test_a_ragged_table_does_not_reach_aiter(
    double: Double, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Importing the entry without a table of ours would merge the shipped ones, and fail."""
    if double.generation is Generation.FIRST:
        double.ship(k3_rows())
    code, report = built(double, request(checkpoint), capsys)
    assert code == ExitCode.OK
    assert any("have more fields than the header's 28" in note for note in report["notes"])


def test_kernels_that_come_with_aiter(
    double: Double, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Naming another directory hides them, and a start would compile them again."""
    (double.site / "aiter/jit/flydsl_cache").mkdir()
    _, found, _ = checked(double, request(checkpoint), capsys)
    assert any("cp -an" in note for note in found["notes"])


def test_a_table_of_the_operators(
    double: Double, checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """AITER_CONFIG_FMOE is what a start will look up in, alone."""
    table = tmp_path / "empty.csv"
    table.write_text(",".join(COLUMNS) + "\n")
    code, report = built(double, request(checkpoint), capsys, AITER_CONFIG_FMOE=str(table))
    assert code == ExitCode.OK
    assert report["notes"][0].startswith(f"0 of 13 rows have tuned kernels (from {table})")


def test_a_kernel_that_cannot_be_compiled(
    double: Double, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What, where and why; what could be compiled stays, and the check tells the two apart."""
    double.behave(fail=["moe2_abf16_wint4_bf16_t32x128x128_atomic"])
    asked = request(checkpoint)
    code, report = built(double, asked, capsys)
    assert (code, report["state"]) == (ExitCode.FAILED, "failed")
    # Of 2048 tokens and more: the fallback's tiles.
    for failure in report["failures"]:
        assert failure["kernels"][-1] == "flydsl_moe2_abf16_wint4_bf16_t32x128x128_atomic"
        assert failure["shape"] == {"model_dim": 3584, "inter_dim": 384, "experts": 896, "topk": 16}
        assert "failed to legalize operation" in failure["why"]
    code, found, states = checked(double, asked, capsys)
    assert (code, found["state"], states["missing"]) == (ExitCode.FAILED, "missing", 1)
    (missing,) = [kernel for kernel in found["kernels"] if kernel["state"] == "missing"]
    assert missing["kernel"] == "flydsl_moe2_abf16_wint4_bf16_t32x128x128_atomic"
    assert missing["why"] == "launch_gemm2 is not in the cache"
    assert states["present"] == report["kernels"] - 1


def test_a_first_stage_that_is_missing(
    double: Double, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newer entry looks no further in that row: its second stage is unknown, not present."""
    double.behave(fail=["moe1_abf16_wint4_bf16_t32x128x128"])
    asked = request(checkpoint)
    built(double, asked, capsys)
    _, found, states = checked(double, asked, capsys)
    assert states["missing"] == 1
    assert states["unknown"] == (1 if double.generation is Generation.THIRD else 0)
    assert found["state"] == "missing"


def test_a_compiler_that_llvm_ends(
    double: Double, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """AITER's worker dies by SIGABRT and is tried again; the others go on, and nothing half-written stays."""
    double.behave(abort=["moe2_abf16_wint4_bf16_t32x128x128_atomic"])
    code, report = built(double, request(checkpoint), capsys)
    assert code == ExitCode.FAILED
    (failure,) = report["failures"]
    assert failure["kernels"][-1] == "flydsl_moe2_abf16_wint4_bf16_t32x128x128_atomic"
    assert failure["why"].startswith("its compiler was ended by SIGABRT: LLVM ERROR: Cannot select")
    assert len(compiled(report["directory"])) >= 2
    assert not list(Path(report["directory"]).glob("*/.*"))
    assert "LLVM ERROR" in Path(report["log"]).read_text()


def test_a_name_that_aiter_does_not_know(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The older entry warns, compiles the rest and exits with 0: that is a failure."""
    double = install(tmp_path / "site", Generation.FIRST)
    double.ship(row[: len(COLUMNS)] for row in k3_rows())
    asked = request(checkpoint, "ep8")
    code, report = built(double, asked, capsys)
    assert code == ExitCode.FAILED
    assert [failure["why"] for failure in report["failures"]] == ["AITER knows no kernel of that name"]
    code, found, _ = checked(double, asked, capsys)
    (unknown,) = [each for each in found["kernels"] if each["why"] == "AITER knows no kernel of that name"]
    assert unknown["state"] == "unknown"


def test_an_entry_that_cannot_be_imported(
    double: Double, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """AITER without a package that it needs: its own words."""
    entry = double.site / "aiter/aot/flydsl/moe.py"
    entry.write_text(f"import nothing_like_this\n{entry.read_text()}")
    entry.write_text(entry.read_text().replace("from __future__ import annotations", ""))
    code, report = built(double, request(checkpoint), capsys)
    assert code == ExitCode.FAILED
    assert "ended with code 1: ModuleNotFoundError: No module named" in report["failures"][0]["why"]


def test_an_entry_that_does_nothing(
    double: Double, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0 and AITER's own sentence prove nothing."""
    entry = double.site / "aiter/aot/flydsl/moe.py"
    entry.write_text('print("All compilations succeeded. Cache is ready.")\n')
    code, report = built(double, request(checkpoint), capsys)
    assert code == ExitCode.FAILED
    assert "counts none as compiled, of 26" in report["failures"][0]["why"]
    entry.write_text('print("Compiled: 26 ok, 0 failed")\nprint("Cache is ready.")\n')
    code, report = built(double, request(checkpoint), capsys)
    assert code == ExitCode.FAILED
    assert "nothing is in" in report["failures"][0]["why"]


def test_a_flydsl_that_cannot_only_look(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check must not compile: unknown, which is not present."""
    double = install(tmp_path / "site", Generation.FIRST, flydsl="0.2.4")
    asked = request(checkpoint)
    built(double, asked, capsys)
    code, _, states = checked(double, asked, capsys)
    assert (code, set(states)) == (ExitCode.FAILED, {"unknown"})


def test_a_flydsl_that_compiles_in_spite_of_being_told(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it says is then no answer, and that is noticed by what it wrote."""
    double = install(tmp_path / "site", Generation.SECOND, flydsl="0.2.4")
    (double.site / "flydsl/utils/env.py").write_text("run_only = False\n")
    asked = request(checkpoint)
    _, report = built(double, asked, capsys)
    next(Path(report["directory"]).glob("*/*.pkl")).unlink()
    code, found, states = checked(double, asked, capsys)
    assert (code, set(states)) == (ExitCode.FAILED, {"unknown"})
    assert "changed while it was looked at" in found["kernels"][0]["why"]


def test_another_build_of_aiter_has_another_directory(
    double: Double, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rebuilt AITER may call itself the same and must not find what the old one compiled."""
    _, before = built(double, request(checkpoint), capsys)
    source = double.site / "aiter/ops/flydsl/moe_kernels.py"
    source.write_text(f"{source.read_text()}\n# mended\n")
    code, found, states = checked(double, request(checkpoint), capsys)
    assert (code, set(states)) == (ExitCode.FAILED, {"missing"})
    assert found["directory"] != before["directory"]
    assert Path(found["directory"]).name.startswith("gfx942-aiter-0.1.24-flydsl-0.4.2-")


def test_one_build_at_a_time(double: Double, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two would write one log and remove each other's files."""
    _, report = built(double, request(checkpoint), capsys)
    with Path(report["directory"], ".build.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OperatorError, match="another build") as caught:
            built(double, request(checkpoint), capsys)
    assert caught.value.exit_code is ExitCode.IN_USE


def test_for_people(double: Double, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line per failure and per kernel, progress elsewhere, and how a start finds the directory."""
    double.behave(fail=["moe2_abf16_wint4_bf16_t32x128x128_atomic"])
    asked = request(checkpoint, as_json=False)
    search = (str(double.site),)
    assert run_build(asked, environment=ENVIRONMENT, search=search) == ExitCode.FAILED
    out, err = capsys.readouterr()
    assert "failed  flydsl_moe" in out
    assert " at model_dim=3584 inter_dim=384 E=896 topk=16" in out
    assert "FLYDSL_RUNTIME_CACHE_DIR=" in out
    assert "done" in err
    assert run_check(asked, environment=ENVIRONMENT, search=search) == ExitCode.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("missing flydsl_moe2_")
    assert "1 missing" in lines[-1]


def test_only_the_table(
    double: Double, checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """For another machine: nothing is compiled, the same again is no error, and nobody's file is replaced."""
    path = tmp_path / "k3.csv"

    def write() -> int:
        asked = request(checkpoint)
        return run_build(asked, csv_only=path, environment=ENVIRONMENT, search=(str(double.site),))

    assert [write(), write()] == [ExitCode.OK] * 2
    assert len(path.read_text().splitlines()) == 14
    assert not (tmp_path / "cache").exists()
    path.write_text("something else")
    with pytest.raises(OperatorError, match="something else in it"):
        write()
    capsys.readouterr()


def test_refusals(double: Double, checkpoint: Path, tmp_path: Path) -> None:
    """Usage is one line and code 2, before anything is started."""
    search = (str(double.site),)
    for asked, what in (
        (request(checkpoint, arch="gfx950"), "--arch 'gfx950'"),
        (request(checkpoint, "mi355x-native"), "--profile mi355x-native"),
        (request(checkpoint, "ep-8"), "did you mean 'ep8'"),
    ):
        with pytest.raises(OperatorError, match=what) as caught:
            run_build(asked, environment=ENVIRONMENT, search=search)
        assert caught.value.exit_code is ExitCode.USAGE
    with pytest.raises(OperatorError, match="without aiter and flydsl") as caught:
        run_check(request(checkpoint), environment=ENVIRONMENT, search=(str(tmp_path),))
    assert caught.value.exit_code is ExitCode.USAGE
    (double.site / "aiter/aot/flydsl/moe.py").unlink()
    with pytest.raises(OperatorError, match="cannot compile ahead of time"):
        find_aiter(search)


def test_a_directory_that_cannot_be_written(
    double: Double, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the flag."""
    (checkpoint.parent / "cache").write_text("a file")
    with pytest.raises(OperatorError, match="cannot be used for kernels") as caught:
        built(double, request(checkpoint), capsys)
    assert "--cache-dir" in str(caught.value)


def test_the_environment_of_a_run(tmp_path: Path) -> None:
    """What decides what is compiled, and where, is said by this program alone; and no secret is handed on."""
    double = install(tmp_path, Generation.FIRST)
    given = (
        {
            "HOME": "/home/a",
            "KIMI_K3_API_KEY": "secret",
            "VLLM_API_KEY": "secret",
            "AITER_CONFIG_FMOE": "/other.csv",
            "AITER_AOT_IMPORT": "1",
            "GPU_ARCHS": "gfx950",
            "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
            "FLYDSL_COMPILE_OPT_LEVEL": "3",
            "COMPILE_ONLY": "0",
        },
        double.aiter,
    )
    where: dict[str, Any] = {"cache": Path("/cache"), "table": Path("/table.csv")}
    expected = {
        "HOME": "/home/a",
        "FLYDSL_COMPILE_OPT_LEVEL": "3",
        "AITER_CONFIG_FMOE": "/table.csv",
        "AITER_FLYDSL_AOT_WORKERS": "3",
        "FLYDSL_RUNTIME_CACHE_DIR": "/cache",
        "FLYDSL_GPU_ARCH": "gfx942",
        "GPU_ARCHS": "gfx942",
        "ARCH": "gfx942",
        "CU_NUM": "304",
        "CUDA_VISIBLE_DEVICES": "-1",
        "HIP_VISIBLE_DEVICES": "-1",
        "ROCR_VISIBLE_DEVICES": "-1",
    }
    found = environment_of_entry(*given, **where, gpu=GPUS["mi300x"], workers=3)
    assert found == {**expected, "AITER_AOT_IMPORT": "1"}, "without ROCm's compiler, where that is enough"
    entry = double.site / "aiter/aot/flydsl/moe.py"
    entry.write_text(entry.read_text() + "\n    from aiter import dtypes\n")
    assert environment_of_entry(*given, **where, gpu=GPUS["mi300x"], workers=3) == expected


def test_workers() -> None:
    """No more than cores; an operator's number counts, and nonsense is a line and not AITER's traceback."""
    assert 1 <= worker_count({}) <= len(os.sched_getaffinity(0))
    assert worker_count({"AITER_FLYDSL_AOT_WORKERS": "7"}) == 7
    for given in ("0", "-1", "many", "²"):
        with pytest.raises(OperatorError, match="AITER_FLYDSL_AOT_WORKERS"):
            worker_count({"AITER_FLYDSL_AOT_WORKERS": given})


def test_a_start_finds_what_was_built(
    double: Double, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without a checkpoint the sizes are the published ones; a start of the same AITER looks there."""
    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    search = (str(double.site),)
    assert built_directory(environment, search) is None
    asked = Request(checkpoint=None, profile="tp8", arch="gfx942", cache=None, as_json=True)
    assert run_build(asked, environment=environment, search=search) == ExitCode.OK
    report = json.loads(capsys.readouterr().out)
    assert built_directory(environment, search) == Path(report["directory"])
    assert built_directory(environment, (str(tmp_path / "no-aiter"),)) is None


def test_the_usual_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the other caches of a user."""
    assert default_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/kimi-k3/kernels")
    monkeypatch.setenv("HOME", "/h")
    assert default_cache({}) == Path("/h/.cache/kimi-k3/kernels")
