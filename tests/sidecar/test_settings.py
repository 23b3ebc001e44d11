# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.sidecar.settings import Settings


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only this machine may ask unless told otherwise; the directory is the one all processes share."""
    monkeypatch.setenv("KIMI_K3_STATE_DIR", str(tmp_path))
    settings = Settings.read()
    assert (settings.host, settings.port, settings.state_dir) == ("127.0.0.1", 8001, tmp_path)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers are set up by variables."""
    monkeypatch.setenv("KIMI_K3_SIDECAR_PORT", "9001")
    monkeypatch.setenv("KIMI_K3_SIDECAR_HOST", "0.0.0.0")
    assert (Settings.read().host, Settings.read().port) == ("0.0.0.0", 9001)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("KIMI_K3_SIDECAR_PROT", "1", "did you mean 'KIMI_K3_SIDECAR_PORT'?"),
        ("KIMI_K3_SIDECAR_PORT", "http", "KIMI_K3_SIDECAR_PORT='http'"),
        ("KIMI_K3_SIDECAR_PORT", "70000", "less than or equal to 65535"),
        ("KIMI_K3_SIDECAR_PORT", "tcp://10.0.0.7:8001", "enableServiceLinks: false"),
        ("KIMI_K3_SIDECAR_SERVICE_HOST", "10.0.0.7", "enableServiceLinks: false"),
        ("KIMI_K3_SIDECAR_PORT_8001_TCP_ADDR", "10.0.0.7", "enableServiceLinks: false"),
        ("KIMI_K3_SIDECAR_ENGINE_TIMEOUT_SECONDS", "0", "greater than 0"),
    ],
)
def test_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str) -> None:
    """A variable that is not understood is an error that names it, on one line, never a silent default.

    Kubernetes sets some of these names itself next to a Service called kimi-k3-sidecar; the
    operator never wrote them and needs to hear where they come from.
    """
    monkeypatch.setenv(name, value)
    with pytest.raises(OperatorError) as caught:
        Settings.read()
    assert caught.value.exit_code == ExitCode.USAGE
    assert name in str(caught.value)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_argument() -> None:
    """A misspelt keyword must not leave the default in force."""
    with pytest.raises(ValidationError):
        Settings(prot=1)  # type: ignore[call-arg]
