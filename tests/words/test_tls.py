# SPDX-License-Identifier: Apache-2.0
"""A server's pair of files, and whom a client trusts."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from kimi_k3.errors import OperatorError
from kimi_k3.words.tls import Certificate, checked_certificate, is_loopback, trust
from tests.certificates import signed

NAMES = ("--tls-cert-file", "--tls-key-file")


def test_a_pair(tmp_path: Path) -> None:
    """Two files that belong together are taken as they are; none are no TLS."""
    one = signed(tmp_path, "engine")
    assert checked_certificate(one.certificate, one.key, names=NAMES) == Certificate(one.certificate, one.key)
    assert checked_certificate(None, None, names=NAMES) is None


def test_no_pair(tmp_path: Path) -> None:
    """Found before vLLM is started, which would tell after minutes; never what is in a file."""
    one, other = signed(tmp_path / "one", "a"), signed(tmp_path / "other", "b")
    nothing = tmp_path / "nothing"
    empty = tmp_path / "empty"
    empty.touch()
    for certificate, key, said in (
        (one.certificate, None, "--tls-cert-file is given without --tls-key-file"),
        (None, one.key, "--tls-key-file is given without --tls-cert-file"),
        (one.certificate, other.key, "KEY_VALUES_MISMATCH"),
        (nothing, one.key, "No such file"),
        (empty, one.key, "give a certificate and its key"),
        (one.key, one.certificate, "give a certificate and its key"),
    ):
        with pytest.raises(OperatorError, match=said) as refused:
            checked_certificate(certificate, key, names=NAMES)
        assert "PRIVATE" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("https://127.0.0.1:8000", True),
        ("https://127.8.9.1", True),
        ("https://[::1]:8000/x", True),
        ("https://localhost:1", True),
        ("https://engine:8000", False),
        ("https://10.0.0.1", False),
        ("https://localhost.example.com", False),
        ("https://[broken", False),
        ("", False),
    ],
)
def test_loopback(url: str, own: bool) -> None:
    """Only there a certificate is not checked."""
    assert is_loopback(url) is own


def test_trust(tmp_path: Path) -> None:
    """Elsewhere it is checked, by the authorities that were named or by the system's."""
    one = signed(tmp_path, "engine")
    assert trust("https://127.0.0.1").verify_mode is ssl.CERT_NONE
    for authorities in (None, one.authority):
        context = trust("https://engine", authorities)
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert len(trust("https://engine", one.authority).get_ca_certs()) == 1
    with pytest.raises(OperatorError, match="--ca-file"):
        trust("https://engine", tmp_path / "nothing")
