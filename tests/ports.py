# SPDX-License-Identifier: Apache-2.0
"""Ports for what a test starts."""

from __future__ import annotations

import random
import socket

LOWEST, HIGHEST = 15_000, 19_999
"""Below those that the kernel gives to clients (net.ipv4.ip_local_port_range, on Linux from 32768 on): one of
these stays free although many connections are made before somebody listens there."""


def free_port() -> int:
    """A port that nobody listens on at the moment, and that no client gets by accident."""
    while True:
        port = random.SystemRandom().randint(LOWEST, HIGHEST)
        with socket.socket() as probe:
            # As servers do: a port whose last connections are still fading away is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
