# SPDX-License-Identifier: Apache-2.0
"""Making ourselves heard.

vLLM wraps an exception of a worker several times before its API server dies, and the supervisor
would have to guess which of 200 log lines matters. So a failure of ours is written to the journal
where it happens.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from kimi_k3.errors import OperatorError
from kimi_k3.journal.models import FailureRecord, failure_file
from kimi_k3.journal.writer import now, write_record
from kimi_k3.words.environment import EngineEnvironment


def say(line: str) -> None:
    """Print a line of ours; vLLM shows only its own loggers."""
    print(f"kimi-k3: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Write an :class:`OperatorError` that passes to the journal and to stderr, then let it go on."""
    try:
        yield
    except OperatorError as error:
        say(f"error: {error}")
        with contextlib.suppress(OSError, OperatorError):
            _record(error)
        raise


def _record(error: OperatorError) -> None:
    environment = EngineEnvironment.read()
    if environment.state_dir is None or environment.start_id is None:
        return
    record = FailureRecord(
        start_id=environment.start_id, pid=os.getpid(), at=now(), what=error.what, remedy=error.remedy
    )
    write_record(environment.state_dir, failure_file(os.getpid()), record)
