# SPDX-License-Identifier: Apache-2.0
"""Ports for what a test starts."""

from __future__ import annotations

import itertools
import os
import random
import socket

LOWEST, HIGHEST = 15_000, 19_999
"""Below those that the kernel gives to clients (net.ipv4.ip_local_port_range, on Linux from 32768 on): one of
these stays free although many connections are made before somebody listens there."""

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_OWN = range(LOWEST + _WORKER, HIGHEST + 1, _WORKERS)
_PORTS = itertools.cycle(random.SystemRandom().sample(_OWN, len(_OWN)))


def free_port() -> int:
    """A port that nobody listens on, that no client gets by accident and no other test was given lately.

    vLLM listens on its port only when it has loaded the weights: until then the kernel would call it free. So
    every process of a test run has ports of its own, in an order of its own, because there may be two runs.
    """
    for port in _PORTS:
        with socket.socket() as probe:
            # As servers do: a port whose last connections are still fading away is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("an endless cycle ended")
