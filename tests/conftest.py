# SPDX-License-Identifier: Apache-2.0
"""What every test run needs, however it was started."""

from __future__ import annotations

import signal

import tests.surroundings  # noqa: F401  (first: it records the environment before anything is imported)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores SIGINT for what it starts in the background, and children inherit that: the tests
    # that send a Ctrl-C would wait for ever. With a handler here, children start with the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)
