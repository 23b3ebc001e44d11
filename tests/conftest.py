# SPDX-License-Identifier: Apache-2.0
"""What every test run needs, however it was started."""

from __future__ import annotations

import signal

import tests.surroundings  # noqa: F401  (first: it records the environment before anything is imported)

# isort: split
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores SIGINT for what it starts in the background, and children inherit that: the tests
    # that send a Ctrl-C would wait for ever. With a handler here, children start with the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)


class BySharing(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """One process for the tests of a file, and one for all that share the one Docker engine."""

    def _split_scope(self, nodeid: str) -> str:
        shared = "tests/docker/"
        return shared if nodeid.startswith(shared) else nodeid.split("::", 1)[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> BySharing | None:
    """How ``--dist loadfile`` hands out tests."""
    return BySharing(config, log) if config.getvalue("dist") == "loadfile" else None
