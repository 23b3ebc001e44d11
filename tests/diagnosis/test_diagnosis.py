# SPDX-License-Identifier: Apache-2.0
"""The failure catalogue and what is made of a log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kimi_k3.diagnosis.catalogue import Catalogue, Failure, load_catalogue
from kimi_k3.diagnosis.match import MAX_QUOTED, diagnose

# Lines as they were printed, one for each row.
SEEN = {
    "flydsl-wide-lds-load": "LLVM ERROR: Do not know how to expand this operator's operand!",
    "buffer-atomic-bf16": "LLVM ERROR: Cannot select: t7: v2bf16,ch = AMDGPUISD::BUFFER_ATOMIC_FADD t0",
    "mla-gluon": "AssertionError: mla_gluon requires gfx950 (CDNA4), got gfx942",
    "aiter-without-situ": "RuntimeError: This AITER build ignores the SiTUv2 activation",
    "no-mxfp4-backend": "ValueError: No MXFP4 MoE backend supports the deployment configuration.",
    "device-out-of-memory": "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.15 GiB",
    "device-memory-taken": "ValueError: Free memory on device cuda:0 (1/256 GiB) on startup is less than "
    "desired GPU memory utilization (0.9, 230 GiB).",
    "host-memory-taken": "ValueError: Available memory on node 0 (1.0/8.0 GiB) on kv cache allocation is "
    "less than requested memory for kv (4.0 GiB)",
    "no-memory-for-cache": "ValueError: No available memory for the cache blocks. Try increasing",
    "model-len-too-big": "the estimated maximum model length is 4096. Try increasing",
    "shared-memory-too-small": "Fatal Python error: Bus error",
    "worker-killed": "ERROR Worker proc VllmWorker-3 died unexpectedly (exit code: -9), shutting down",
    "kfd-permission": "Unable to open /dev/kfd read-write: Permission denied",
    "kfd-missing": "Unable to open /dev/kfd read-write: No such file or directory",
    "wrong-arch-binary": "HIP error: no kernel image is available for execution on the device",
    "engine-ready-timeout": "TimeoutError: Timed out waiting for engine core processes to start.",
    "plugin-not-loaded": "ValueError: Load format `kimi_k3` is not supported",
    "port-taken": "OSError: [Errno 98] Address already in use",
    "repo-id": "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name'",
    "unknown-quantization": "ValueError: unknown quantization name 'int4_x'; expected one of ['mxfp4']",
    "unknown-argument": "api_server.py: error: unrecognized arguments: --no-such-flag",
}


def test_every_row_has_a_line_that_was_seen() -> None:
    """A pattern nobody tried is a guess."""
    assert set(SEEN) == {failure.name for failure in load_catalogue().failures}


@pytest.mark.parametrize(("name", "line"), SEEN.items())
def test_a_known_line_is_recognised(name: str, line: str) -> None:
    """Also behind vLLM's prefix and between other lines."""
    found = diagnose(["INFO before", f"(Worker_TP0 pid=7) {line}", "INFO after"], 1)
    assert found is not None
    assert found.name == name


def test_the_catalogue_comes_before_the_signal_and_the_signal_before_a_traceback() -> None:
    """The most specific knowledge wins."""
    known, vague = SEEN["mla-gluon"], "ValueError: something"
    assert diagnose([known, vague], -9).name == "mla-gluon"  # type: ignore[union-attr]
    assert "out-of-memory killer" in diagnose([vague], -9).cause  # type: ignore[union-attr]
    assert diagnose([vague], 1).cause == vague  # type: ignore[union-attr]


def test_the_wrapper_is_not_the_reason() -> None:
    """Each process prints that another one failed; only one says why (vllm/v1/engine/utils.py)."""
    lines = [
        "(EngineCore pid=9) torch.cuda.SomeError: the reason: a kernel",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
    found = diagnose(lines, 1)
    assert found is not None
    assert found.cause == "torch.cuda.SomeError: the reason: a kernel"


def test_the_reason_of_a_validation_error() -> None:
    """As vLLM 0.32.0 prints a wrong flag: the line of the exception only counts errors."""
    lines = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, User-specified max_model_len (9) is greater than the derived max_model_len",
    ]
    found = diagnose(lines, 1)
    assert found is not None
    assert "max_model_len (9) is greater" in found.cause


@pytest.mark.parametrize("lines", [[], ["INFO all is well"], ["ErrorCorrection: on", "0 errors"]])
def test_nothing_to_go_by(lines: list[str]) -> None:
    """No explanation is better than a wrong one."""
    assert diagnose(lines, 1) is None


@given(st.lists(st.text(max_size=50), max_size=20), st.none() | st.integers(-64, 255))
def test_any_log_gives_one_line_or_nothing(lines: list[str], exit_code: int | None) -> None:
    """A message goes into one line of a log, whatever the engine printed."""
    found = diagnose([*lines, f"ValueError: {'x' * 1000}"], exit_code)
    assert found is not None
    assert "\n" not in found.cause + found.remedy
    assert len(found.cause) <= max(MAX_QUOTED, 100)


def row(**changes: object) -> dict[str, object]:
    return {
        "name": "a-row",
        "pattern": "x",
        "phase": None,
        "cause": "a long cause",
        "remedy": "a long remedy",
        "source": "seen",
        **changes,
    }


@pytest.mark.parametrize("change", [{"pattern": "("}, {"surprise": 1}, {"cause": ""}, {"phase": "load"}])
def test_a_row_is_checked(change: dict[str, object]) -> None:
    """A broken pattern must not wait for the failure it should explain."""
    with pytest.raises(ValidationError):
        Failure.model_validate(row(**change))


def test_a_name_is_used_once() -> None:
    """Documents and metrics refer to rows by name."""
    with pytest.raises(ValidationError, match="used twice"):
        Catalogue.model_validate({"schema_version": 1, "failures": [row(), row()]})
