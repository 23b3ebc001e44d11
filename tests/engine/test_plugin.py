# SPDX-License-Identifier: Apache-2.0
"""The plugin as vLLM loads it: in a fresh process, through the entry point."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kimi_k3.journal.models import FailureRecord
from tests.surroundings import SURROUNDINGS

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
    line = "environment variable KIMI_K3_ACCEPT_LOSSY='yes': Value error, must be 1 or 0; correct or unset it"
    assert f"kimi-k3: error: {line}" in result.stderr


def test_other_platforms_are_left_alone() -> None:
    """Installed beside a vLLM for other GPUs, the plugin must not touch a single module of it."""
    result = _python(
        "import sys, vllm.platforms as platforms\n"
        "class Other:\n    device_name = 'cuda'\n    def is_cpu(self): return False\n"
        "platforms._current_platform = Other()\n"
        "before = set(sys.modules)\n"
        "from kimi_k3.engine.plugin import register; register()\n"
        "ours = ('vllm', 'kimi_k3.engine.cpu')\n"
        "print(sorted(name for name in set(sys.modules) - before if name.startswith(ours)))"
    )
    assert result.stdout.splitlines()[-1] == "[]", result.stderr


def test_supervised_start_on_a_platform_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    """A supervised start must not become an unconverted one because the plugin found nothing to do."""
    result = _python(
        "import vllm.platforms as platforms\n"
        "class Other:\n    device_name = 'cuda'\n    def is_cpu(self): return False\n"
        "platforms._current_platform = Other()\n" + LOAD,
        KIMI_K3_STATE_DIR=str(tmp_path),
        KIMI_K3_START_ID="start",
    )
    assert result.returncode == 1
    (failure,) = [
        FailureRecord.model_validate_json(path.read_text()) for path in tmp_path.glob("failure-*.json")
    ]
    assert "platform 'cuda' is not supported" in failure.what
