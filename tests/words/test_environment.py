# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.environment import EngineEnvironment, default_state_dir


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
