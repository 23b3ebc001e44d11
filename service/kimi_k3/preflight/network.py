# SPDX-License-Identifier: Apache-2.0
"""The engine's address: valid and free."""

from __future__ import annotations

import errno
import socket

from kimi_k3.errors import ExitCode, OperatorError


def check_port_free(host: str, port: int, *, flag: str = "--port") -> None:
    """Bind ``host:port`` once, as vLLM will.

    Args:
        flag: by which the port is given.

    Raises:
        OperatorError: the host is not an address of this machine, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        # A UnicodeError is what Python's own encoding of names (IDNA) says to "..", before it asks anybody.
        reason = error.strerror if isinstance(error, socket.gaierror) else "no name can be written like this"
        raise OperatorError(
            f"--host {host!r}: is not an address: {reason or error}",
            remedy="give an address of this machine, 0.0.0.0 or 127.0.0.1",
            exit_code=ExitCode.USAGE,
        ) from None
    try:
        with socket.socket(family, kind, protocol) as probe:
            # vLLM sets it too; a port in TIME_WAIT is free for it.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise _refused(host, port, flag, error) from None


def _refused(host: str, port: int, flag: str, error: OSError) -> OperatorError:
    if error.errno == errno.EADDRINUSE:
        return OperatorError(
            f"{flag} {port} on {host}: another process is listening there",
            remedy=f"end it (see: ss -ltnp 'sport = :{port}') or give another {flag}",
            exit_code=ExitCode.IN_USE,
        )
    if error.errno == errno.EACCES:
        return OperatorError(
            f"{flag} {port} on {host}: needs privileges that this process does not have",
            remedy="give a port of 1024 or above",
            exit_code=ExitCode.USAGE,
        )
    return OperatorError(
        f"--host {host} --port {port}: cannot listen there: {error.strerror or error}",
        remedy="give an address of this machine, 0.0.0.0 or 127.0.0.1",
        exit_code=ExitCode.USAGE,
    )
