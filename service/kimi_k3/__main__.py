# SPDX-License-Identifier: Apache-2.0
"""Entry point of the command ``kimi-k3``: quiet from its first moment on, so it imports next to nothing."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Import the command line and run it; a Ctrl-C meanwhile only ends it, as nothing has begun."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # An exception would surface somewhere in an import, with its traceback, or be swallowed there.
        signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    if os.getpid() == 1:
        # From a container's first process the kernel keeps each signal for which it has no handler.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: os._exit(128 + number))
        # On a container's volumes the next user may be another number of the same group.
        os.umask(0o002)
    from kimi_k3.cli import main as run

    run()


if __name__ == "__main__":
    main()
