# SPDX-License-Identifier: Apache-2.0
"""A deployment that speaks TLS: the supervisor's own questions, the sidecar's, and everybody else's."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kimi_k3.checkpoint import make_tiny_checkpoint
from tests.certificates import signed
from tests.serving.deployment import COMMAND, Deployment, Mode, environment, started

pytestmark = pytest.mark.engine


def own_address() -> str:
    """An address of this machine that is not the loopback one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the kernel only says from where it would.
        probe.connect(("192.0.2.1", 9))
        address: str = probe.getsockname()[0]
        return address


def smoke(deployment: Deployment, host: str, *further: str) -> subprocess.CompletedProcess[str]:
    """``kimi-k3 verify smoke`` of the deployment at ``host``."""
    urls = {
        name: f"https://{host}:{urlsplit(url).port}"
        for name, url in (("--engine", deployment.engine_url), ("--sidecar", deployment.sidecar_url))
    }
    return subprocess.run(
        [COMMAND, "verify", "smoke", *(part for pair in urls.items() for part in pair), *further],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_everything_over_tls(tmp_path: Path) -> None:
    """Ready means that the canary was answered and that the sidecar asked: both over TLS, by the loopback.

    Whoever comes from elsewhere checks the certificate, by the authority that signed it, and by no other.
    """
    make_tiny_checkpoint(tmp_path / "tiny")
    address = own_address()
    tls = signed(tmp_path / "tls", address)
    with started(
        tmp_path / "tiny", tmp_path, Mode(weights="int4"), api_key="key", tls=tls, host="0.0.0.0"
    ) as deployment:
        key = tmp_path / "key"
        key.write_text("key")
        given = ("--api-key-file", str(key), "--weights", "int4")
        good = smoke(deployment, address, *given, "--ca-file", str(tls.authority))
        assert good.returncode == 0, good.stdout + good.stderr
        stranger = smoke(deployment, address, *given)
        assert stranger.returncode == 1
        assert stranger.stdout.count("CERTIFICATE_VERIFY_FAILED") + stranger.stdout.count("certificate") >= 3
        assert smoke(deployment, "127.0.0.1", *given).returncode == 0
        watched = subprocess.run(
            [COMMAND, "watch", deployment.sidecar_url, "--once"],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert watched.returncode == 0, watched.stdout
