# SPDX-License-Identifier: Apache-2.0
"""The plugin as vLLM loads it: in a fresh process, through the entry point."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_k3.journal.models import FailureRecord
from tests.surroundings import SURROUNDINGS
from tests.wheels import vllm_source

GFX942 = Path(__file__).parent / "gfx942"
SERVICE = Path(__file__).parents[2] / "service"

LOAD = "from vllm.plugins import load_general_plugins; load_general_plugins(); print('went on')"


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**SURROUNDINGS, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_entry_point_registers_the_loader_and_the_experts() -> None:
    """Without the entry point vLLM would serve without us and say nothing."""
    result = _python(
        LOAD + "\nfrom vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as loaders"
        "\nfrom vllm.model_executor.layers.quantization import get_quantization_config"
        "\nprint(loaders['kimi_k3'].__name__, get_quantization_config('mxfp4').__name__)"
    )
    assert result.stdout.splitlines()[-2:] == ["went on", "ReportingModelLoader KimiK3Mxfp4Config"], (
        result.stderr
    )


def test_our_own_failure_ends_the_process_and_is_in_the_journal(tmp_path: Path) -> None:
    """vLLM swallows exceptions of plugins; a variable that we do not understand must not be skipped over."""
    result = _python(
        LOAD, KIMI_K3_ACCEPT_LOSSY="yes", KIMI_K3_STATE_DIR=str(tmp_path), KIMI_K3_START_ID="start"
    )
    assert result.returncode == 2
    assert "went on" not in result.stdout
    line = "environment variable KIMI_K3_ACCEPT_LOSSY='yes': must be 1 or 0; correct or unset it"
    assert f"kimi-k3: error: {line}" in result.stderr


CUDA = (
    "import vllm.platforms as platforms\n"
    "class Other:\n"
    "    device_name = 'cuda'\n"
    "    def is_cpu(self): return False\n"
    "    def is_rocm(self): return False\n"
    "platforms._current_platform = Other()\n"
)


@pytest.mark.parametrize("architecture", ["cuda", "gfx950"])
def test_other_platforms_are_left_alone(architecture: str) -> None:
    """Installed beside a vLLM for other GPUs, the plugin imports nothing but itself, of vLLM nothing new."""
    code = (
        CUDA
        if architecture == "cuda"
        else "from vllm.platforms import current_platform; current_platform.is_rocm()\n"
    )
    path = [] if architecture == "cuda" else [GFX942 / "double", vllm_source("0.33.0").parent]
    result = _python(
        "import sys\n" + code + "before = set(sys.modules)\n"
        "from kimi_k3.engine.plugin import register; register()\n"
        "print(sorted(name for name in set(sys.modules) - before if name.startswith(('vllm', 'kimi_k3'))))",
        PYTHONPATH=os.pathsep.join(map(str, [*path, SERVICE])),
        DOUBLE_ARCHITECTURE=architecture,
    )
    assert result.stdout.splitlines()[-1:] == ["['kimi_k3', 'kimi_k3.engine', 'kimi_k3.engine.plugin']"], (
        result.stderr
    )


@pytest.mark.parametrize(("weights", "goes_on"), [("mxfp4", True), ("int4", False)])
def test_supervised_starts_on_gfx950(tmp_path: Path, weights: str, goes_on: bool) -> None:
    """vLLM serves MXFP4 there by itself; an int4 start must not become one without conversion."""
    result = _python(
        LOAD,
        PYTHONPATH=os.pathsep.join(map(str, [GFX942 / "double", vllm_source("0.33.0").parent, SERVICE])),
        DOUBLE_ARCHITECTURE="gfx950",
        KIMI_K3_STATE_DIR=str(tmp_path),
        KIMI_K3_START_ID="start",
        KIMI_K3_WEIGHTS=weights,
    )
    assert (result.returncode == 0) is goes_on
    assert ("went on" in result.stdout) is goes_on
    assert bool(list(tmp_path.glob("failure-*.json"))) is not goes_on


def test_supervised_start_on_a_platform_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    """A supervised start must not become an unconverted one because the plugin found nothing to do."""
    result = _python(CUDA + LOAD, KIMI_K3_STATE_DIR=str(tmp_path), KIMI_K3_START_ID="start")
    assert result.returncode == 1
    (failure,) = [
        FailureRecord.model_validate_json(path.read_text()) for path in tmp_path.glob("failure-*.json")
    ]
    assert "this is 'cuda'" in failure.what


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM 0.33.0 with one changed line in a function that the plugin builds on."""
    directory = tmp_path_factory.mktemp("patched")
    shutil.copytree(vllm_source("0.33.0"), directory / "vllm", copy_function=os.symlink)
    file = directory / "vllm/model_executor/model_loader/utils.py"
    text = file.read_text(encoding="utf-8")
    file.unlink()
    changed = text.replace(
        "def process_weights_after_loading(", "def process_weights_after_loading(  # mine\n    "
    )
    assert changed != text
    file.write_text(changed, encoding="utf-8")
    return directory


@pytest.mark.parametrize(("allowed", "goes_on"), [("0", False), ("1", True)])
def test_a_vllm_with_other_lines(patched: Path, tmp_path: Path, allowed: str, goes_on: bool) -> None:
    """Refused by the plugin itself, since not every start has a preflight; allowed only by name."""
    result = _python(
        LOAD,
        PYTHONPATH=os.pathsep.join(map(str, [GFX942 / "double", patched, SERVICE])),
        KIMI_K3_STATE_DIR=str(tmp_path),
        KIMI_K3_START_ID="start",
        KIMI_K3_ALLOW_UNTESTED_VLLM=allowed,
    )
    assert (
        "process_weights_after_loading in model_executor/model_loader/utils.py has other lines"
        in result.stderr
    )
    assert (result.returncode == 0) is goes_on, result.stderr
    assert ("went on" in result.stdout) is goes_on
    assert bool(list(tmp_path.glob("failure-*.json"))) is not goes_on
