# SPDX-License-Identifier: Apache-2.0
"""A certificate that is renewed while the sidecar serves, as it is every few weeks."""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from kimi_k3.errors import OperatorError
from kimi_k3.words.tls import Certificate, checked_certificate

_log = logging.getLogger("uvicorn.error")

LOOK_SECONDS = 10.0
"""Between two looks at the files. A kubelet takes a minute or more to write a Secret that changed."""

NAMES = ("certificate", "key")


@contextlib.contextmanager
def taking_up_renewals(context: ssl.SSLContext, tls: Certificate) -> Iterator[None]:
    """New connections get what the files hold now; a pair that does not fit is told, the old one stays."""
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(context, tls, over), name="certificate", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(context: ssl.SSLContext, tls: Certificate, over: threading.Event) -> None:
    seen = _state(tls)
    while not over.wait(LOOK_SECONDS):
        if (found := _state(tls)) == seen:
            continue
        seen = found
        try:
            # First on its own: a pair that does not fit would leave half of itself in the context.
            checked_certificate(tls.certificate, tls.key, names=NAMES)
            context.load_cert_chain(tls.certificate, tls.key)
        except (OperatorError, OSError) as error:
            _log.warning("The renewed certificate is not taken up, the old one stays: %s", error)
        else:
            _log.info("A renewed certificate is taken up: %s", tls.certificate)


def _state(tls: Certificate) -> tuple[object, ...]:
    return tuple(_stamp(path) for path in (tls.certificate, tls.key))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
