# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 backends``, asked on doubled machines with the real source of both versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_k3.backends import run_backends
from kimi_k3.checkpoint import make_tiny_checkpoint
from kimi_k3.errors import OperatorError
from tests.surroundings import SURROUNDINGS
from tests.wheels import VERSIONS, vllm_source

HERE = Path(__file__).parent
SERVICE = HERE.parents[2] / "service"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_tiny_checkpoint(directory)
    return directory


def ask(tiny: Path, *arguments: str, version: str | None = None, **environment: str) -> dict[str, Any]:
    """The answer by the names of back ends; without a version the installed vLLM answers."""
    path = [SERVICE] if version is None else [HERE / "double", vllm_source(version).parent, SERVICE]
    done = subprocess.run(
        [sys.executable, "-m", "kimi_k3", "backends", str(tiny), "--json", *arguments],
        env=SURROUNDINGS | {"PYTHONPATH": os.pathsep.join(map(str, path))} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    document = json.loads(done.stdout)
    return {row["name"]: row for row in document["rows"]} | {"code": done.returncode, "of": document}


def chosen(answer: dict[str, Any]) -> list[str]:
    return [row["name"] for row in answer["of"]["rows"] if row["verdict"] == "chosen"]


@pytest.mark.parametrize("version", VERSIONS)
def test_int4_on_gfx942(tiny: Path, version: str) -> None:
    """Ours, and of each other one the reason in vLLM's words."""
    answer = ask(tiny, version=version)
    assert answer["of"]["architecture"] == "gfx942"
    assert chosen(answer) == ["AITER_INT4_BF16"]
    assert answer["EMULATION"]["verdict"] == "possible"
    assert "SITU" in answer["AITER_TRITON_MXFP4_BF16"]["why"]
    assert (
        answer["AITER_MXFP4_BF16"]["why"] == "kernel does not support quantization scheme MXFP4 weights with "
        "these activations here"
    )


def test_what_keeps_int4_from_being_served(tiny: Path) -> None:
    """The profile for emulation leaves activations to vLLM; asked for int4, the answer says so."""
    answer = ask(tiny, "--profile", "mxfp4-emulation", "--weights", "int4", version="0.33.0")
    assert chosen(answer) == []
    assert answer["code"] == 1
    assert "VLLM_ROCM_USE_AITER_MOE_SITUV2 is a4w4" in answer["AITER_INT4_BF16"]["why"]
    assert chosen(ask(tiny, "--profile", "mxfp4-emulation", version="0.33.0")) == ["EMULATION"]


def test_native_mxfp4_on_gfx950(tiny: Path) -> None:
    """There vLLM has its own gate, and the plugin nothing to do."""
    answer = ask(tiny, "--profile", "mi355x-native", version="0.33.0", DOUBLE_ARCHITECTURE="gfx950")
    assert chosen(answer) == ["AITER_MXFP4_BF16"]
    assert answer["AITER_INT4_BF16"]["why"] == "only on gfx942"


def test_this_machine(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed vLLM, in a table; a start that runs here is none of its business."""
    monkeypatch.setenv("KIMI_K3_START_ID", "a-start-that-runs")
    monkeypatch.setenv("COLUMNS", "60")
    assert run_backends(tiny, profile_name="cpu-tiny", weights=None, as_json=False) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("vLLM 0.32.0 on cpu")
    assert "CPU_MXFP4" in out
    assert max(map(len, out.splitlines())) <= 60


def test_what_cannot_be_asked(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line, with what vLLM's process said last."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('librocm is missing')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [tmp_path, SERVICE])))
    with pytest.raises(
        OperatorError, match=r"could not be asked \(exit code 1\): ImportError: librocm is missing"
    ):
        run_backends(tiny, profile_name="ep8", weights="int4", as_json=False)
    with pytest.raises(OperatorError, match="--weights 'int8'"):
        run_backends(tiny, profile_name="ep8", weights="int8", as_json=False)
