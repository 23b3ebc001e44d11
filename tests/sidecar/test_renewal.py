# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import httpx

from tests.certificates import Signed, signed

from .serving import wait_until


def test_a_renewed_certificate(tmp_path: Path) -> None:
    """Certificates last weeks and a sidecar months; who checks them would take it for gone."""
    first, second = signed(tmp_path / "first", "localhost"), signed(tmp_path / "second", "localhost")
    served = Signed(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "none")
    log = tmp_path / "log"

    def write(certificate: Path, key: Path) -> None:
        for source, place in ((certificate, served.certificate), (key, served.key)):
            shutil.copy(source, place.with_suffix(".new"))
            place.with_suffix(".new").replace(place)

    def trusted(by: Signed) -> bool:
        try:
            with httpx.Client(verify=ssl.create_default_context(cafile=by.authority), trust_env=False) as one:
                return one.get(f"https://localhost:{port}/livez", timeout=5).is_success
        except httpx.ConnectError:
            return False

    write(first.certificate, first.key)
    code = (
        "from pathlib import Path; from kimi_k3.sidecar import renewal; renewal.LOOK_SECONDS = 0.05;"
        "from kimi_k3.sidecar.server import run; from kimi_k3.sidecar.settings import Settings;"
        f"run(Settings(state_dir=Path({str(tmp_path)!r}), port=0, host='localhost',"
        f" tls_cert_file=Path({str(served.certificate)!r}), tls_key_file=Path({str(served.key)!r})))"
    )
    with log.open("w") as stream:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=stream, stderr=stream)
    try:
        wait_until(lambda: "startup complete" in log.read_text(), seconds=20)
        (port,) = re.findall(r" at https://.*:(\d+)", log.read_text())
        assert trusted(first)
        assert not trusted(second)
        write(second.certificate, second.key)
        wait_until(lambda: trusted(second), seconds=20)
        assert not trusted(first)
        write(second.certificate, first.key)
        wait_until(lambda: "is not taken up, the old one stays" in log.read_text(), seconds=20)
        assert trusted(second)
        write(first.certificate, first.key)
        wait_until(lambda: trusted(first), seconds=20)
    finally:
        process.terminate()
        process.wait(30)
    assert "Traceback" not in log.read_text()
