# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.environment import EngineEnvironment, check_operators_environment, default_state_dir


def test_state_dir_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named directory, else the desktop's convention, else the home."""
    monkeypatch.setenv("HOME", "/home/one")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("KIMI_K3_STATE_DIR", raising=False)
    assert default_state_dir() == Path("/home/one/.local/state/kimi-k3")
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert default_state_dir() == Path("/xdg/kimi-k3")
    monkeypatch.setenv("KIMI_K3_STATE_DIR", "/state")
    assert default_state_dir() == Path("/state")


def test_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's numeric user may have no home; that is mended by one variable, so name it."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("KIMI_K3_STATE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(OperatorError, match="set KIMI_K3_STATE_DIR") as caught:
        default_state_dir()
    assert caught.value.exit_code == ExitCode.STATE


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("0", False), ("", False)])
def test_consent(monkeypatch: pytest.MonkeyPatch, text: str, expected: bool) -> None:
    """Consent is 1; empty is as if it were not set."""
    monkeypatch.setenv("KIMI_K3_ACCEPT_LOSSY", text)
    assert EngineEnvironment.read().accept_lossy is expected


@pytest.mark.parametrize("text", ["yes", "true", "on", "2", " 1"])
def test_unclear_consent_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Consent to lossy weights must not hang on a guess."""
    monkeypatch.setenv("KIMI_K3_ACCEPT_LOSSY", text)
    with pytest.raises(OperatorError, match="KIMI_K3_ACCEPT_LOSSY") as caught:
        EngineEnvironment.read()
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("variable", ["KIMI_K3_STATE_DIR", "XDG_STATE_HOME"])
@pytest.mark.parametrize("text", ["~no-such-user/x", "/state\udcff"])
def test_a_state_dir_that_cannot_be(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    """The same rules as for the flag; the line names the variable."""
    monkeypatch.delenv("KIMI_K3_STATE_DIR", raising=False)
    monkeypatch.setenv(variable, text)
    with pytest.raises(OperatorError, match=variable) as caught:
        default_state_dir()
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("KIMI_K3_ACCEPT_LOSY", "1", "did you mean 'KIMI_K3_ACCEPT_LOSSY'?"),
        ("kimi_k3_accept_lossy", "1", "did you mean 'KIMI_K3_ACCEPT_LOSSY'?"),
        ("KIMI_K3_APIKEY", "x", "did you mean 'KIMI_K3_API_KEY'?"),
        ("KIMI_K3_PORT", "9", "or a flag"),
        ("KIMI_K3_WEIGHT", "int4", "is not known; use --weights"),
        ("KIMI_K3_WEIGHTS", "int4", "is set by `kimi-k3 serve` itself; use --weights"),
        ("KIMI_K3_SCALE_RULE", "amax", "itself; use --scale-rule"),
        ("KIMI_K3_START_ID", "s1", "itself; unset it"),
    ],
)
def test_a_variable_without_effect_is_refused(name: str, value: str, part: str) -> None:
    """Consent that was misspelled, or weights that were not served, would be found out too late."""
    with pytest.raises(OperatorError) as caught:
        check_operators_environment({"PATH": "/bin", name: value})
    assert str(caught.value).startswith(f"environment variable {name} is ")
    assert part in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KIMI_K3_STATE_DIR", "/state"),
        ("KIMI_K3_ACCEPT_LOSSY", "1"),
        ("KIMI_K3_API_KEY", "secret"),
        ("KIMI_K3_WEIGHTS", ""),
        ("KIMI_K3_SIDECAR_PROT", "1"),
        ("KIMI_K3_SERVICE_HOST", "10.0.0.7"),
        ("KIMI_K3_SERVICE_PORT", "8000"),
        ("KIMI_K3_SERVICE_PORT_HTTP", "8000"),
        ("KIMI_K3_PORT", "tcp://10.0.0.7:8000"),
        ("KIMI_K3_PORT_8000_TCP", "tcp://10.0.0.7:8000"),
        ("KIMI_K3_PORT_8000_TCP_ADDR", "10.0.0.7"),
        ("KIMI_K3_PORT_8000_TCP_PORT", "8000"),
        ("KIMI_K3_ENGINE_SERVICE_HOST", "10.0.0.7"),
        ("KIMI_K3_ENGINE_PORT", "tcp://10.0.0.7:8000"),
        ("VLLM_PORT", "1"),
    ],
)
def test_variables_that_are_no_mistake(name: str, value: str) -> None:
    """Ours, empty ones, the sidecar's, and what Kubernetes makes of a Service with our name."""
    check_operators_environment({name: value})
