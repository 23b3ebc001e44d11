# SPDX-License-Identifier: Apache-2.0
"""TLS: a server's certificate, and whom a client trusts."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kimi_k3.errors import ExitCode, OperatorError


@dataclass(frozen=True)
class Certificate:
    """The two files with which a server proves who it is."""

    certificate: Path
    key: Path


def checked_certificate(
    certificate: Path | None, key: Path | None, *, names: tuple[str, str]
) -> Certificate | None:
    """The pair, or ``None`` if neither is given.

    Args:
        names: how an operator gives the two, e.g. ``--tls-cert-file`` and ``--tls-key-file``.

    Raises:
        OperatorError: one without the other, a file that cannot be read, or two that do not belong together.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, missing = names if key is None else reversed(names)
        raise OperatorError(
            f"{given} is given without {missing}", remedy="give both", exit_code=ExitCode.USAGE
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        # ssl.SSLError is an OSError; neither text quotes what is in the files.
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise OperatorError(
            f"{names[0]} {certificate} and {names[1]} {key}: {why}",
            remedy="give a certificate and its key, both PEM and without a password",
            exit_code=ExitCode.USAGE,
        ) from None
    return Certificate(certificate, key)


def trust(url: str, authorities: Path | None = None) -> ssl.SSLContext:
    """Whom a client that asks ``url`` trusts.

    On this machine itself nobody else answers, and a certificate for the name by which others come would not
    fit the loopback address: there it is not checked.

    Args:
        authorities: PEM file; ``None`` for the system's.

    Raises:
        OperatorError: the file cannot be read.
    """
    if is_loopback(url):
        return unchecked()
    try:
        return ssl.create_default_context(cafile=authorities)
    except OSError as error:
        raise OperatorError(
            f"--ca-file {authorities}: {error.strerror or error}",
            remedy="give a PEM file with the authorities' certificates",
            exit_code=ExitCode.USAGE,
        ) from None


def unchecked() -> ssl.SSLContext:
    """Trusts whoever answers."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def is_loopback(url: str) -> bool:
    """Whether a URL's host is this machine, by its loopback address."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _no_password() -> str:
    raise ValueError("the key has a password")
