# SPDX-License-Identifier: Apache-2.0
"""What every test run needs, however it was started."""

from __future__ import annotations

import signal

import tests.surroundings  # noqa: F401  (first: it records the environment before anything is imported)

# isort: split
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores SIGINT for what it starts in the background, and children inherit that: the tests
    # that send a Ctrl-C would wait for ever. With a handler here, children start with the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)


class BySharing(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """One process for the tests of a file, and one for all that share the one Docker engine.

    The first process goes through :data:`LONG_ONES`, the others come from the other end. Of two vLLMs at a
    time, each with a thread for every core, each waits for the other's.
    """

    def _split_scope(self, nodeid: str) -> str:
        shared = "tests/docker/"
        return shared if nodeid.startswith(shared) else nodeid.split("::", 1)[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node is not self.nodes[0]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


LONG_ONES = ("tests/docker/", "tests/serving/", "tests/observability/", "tests/supervisor/", "tests/browser/")
"""Where few tests take many minutes, and most cores."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order in which several processes are handed the files."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _place(item.nodeid))


def _place(nodeid: str) -> int:
    places = (place for place, prefix in enumerate(LONG_ONES) if nodeid.startswith(prefix))
    return next(places, len(LONG_ONES))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> BySharing | None:
    """How ``--dist loadfile`` hands out tests: in their order, not the largest files first."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return BySharing(config, log)
