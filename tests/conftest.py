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


LONG_ONES = ("tests/docker/", "tests/serving/", "tests/observability/", "tests/supervisor/", "tests/browser/")
"""Where few tests take many minutes: begun first, since whoever begins one of these last is waited for."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order in which several processes are handed the files."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _place(item.nodeid))


def _place(nodeid: str) -> int:
    places = (place for place, prefix in enumerate(LONG_ONES) if nodeid.startswith(prefix))
    return next(places, len(LONG_ONES))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> BySharing | None:
    """How ``--dist loadfile`` hands out tests: as they are ordered, not the largest files first."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return BySharing(config, log)
