# SPDX-License-Identifier: Apache-2.0
"""Running the sidecar until it is told to stop."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import socket
import sys

import uvicorn
from starlette.applications import Starlette

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.connection import MAX_HEAD_BYTES, Connection
from kimi_k3.sidecar.renewal import taking_up_renewals
from kimi_k3.sidecar.settings import Settings
from kimi_k3.words.sidecar import TOKEN_FILE
from kimi_k3.words.tls import Certificate

_log = logging.getLogger("uvicorn.error")

MAX_CONNECTIONS = 512
"""At a time; over more than these, only probes are answered. Far below the usual limit of 1024 open files."""

LOOPBACK = ("127.0.0.1", "::1")

SWITCH_SECONDS = 0.0005

YOUNG_OBJECTS = 10_000
"""That are made before they are looked through: records and answers are many objects and die without that."""

GRACE_SECONDS = 5
"""How long requests under way may take once the sidecar is told to stop."""


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        OperatorError: the address cannot be listened on, e.g. because the port is in use.
    """
    # Whoever computes a large answer in a thread gives way to the probes this often; at Python's own 5 ms
    # each of the event loop's system calls would wait so long.
    sys.setswitchinterval(SWITCH_SECONDS)
    # What has been imported stays; a full collection would go through all of it again, 60 ms in one piece.
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    tls = settings.tls
    with listen(settings.host, settings.port) as listener:
        app = create_app(
            settings,
            stopping=lambda: server.should_exit,
            crowded=lambda: len(server.server_state.connections) > MAX_CONNECTIONS,
        )
        config = configuration(app, tls=tls)
        config.load()
        server = uvicorn.Server(config)
        # uvicorn says nothing about a socket that it is given.
        host, port = listener.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        scheme = "http" if tls is None else "https"
        _log.info("Sidecar of %s at %s://%s:%d", settings.state_dir, scheme, address, port)
        if settings.token is None and host not in LOOPBACK:
            _log.warning("Whoever reaches this address may ask everything: no token is set (%s)", TOKEN_FILE)
        with contextlib.ExitStack() as beside:
            if tls is not None and config.ssl is not None:
                beside.enter_context(taking_up_renewals(config.ssl, tls))
            server.run(sockets=[listener])


def configuration(
    app: Starlette, *, grace_seconds: int = GRACE_SECONDS, tls: Certificate | None = None
) -> uvicorn.Config:
    """How uvicorn serves the sidecar: its limits, and what it leaves unsaid."""
    return uvicorn.Config(
        app,
        http=Connection,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        # A probe every few seconds would bury everything else in the log.
        access_log=False,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=grace_seconds,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on ``host:port``; port 0 takes a free one.

    uvicorn would log several lines and exit when it cannot bind, so that is done here.

    Raises:
        OperatorError: the host is not known, or the port is in use or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise OperatorError(
            f"sidecar host {host!r} cannot be resolved: {error}",
            remedy="set KIMI_K3_SIDECAR_HOST to an address of this machine",
            exit_code=ExitCode.USAGE,
        ) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        raise OperatorError(
            f"sidecar address {host}:{port}: {error.strerror}",
            remedy="stop what listens there or choose another KIMI_K3_SIDECAR_PORT"
            if in_use
            else "choose another KIMI_K3_SIDECAR_HOST or KIMI_K3_SIDECAR_PORT",
            exit_code=ExitCode.IN_USE if in_use else ExitCode.USAGE,
        ) from None
    return listener
