# SPDX-License-Identifier: Apache-2.0
"""Bytes of a pipe to printable lines without the API key. Pure."""

from __future__ import annotations

from collections.abc import Iterator

HIDDEN = "***"
MAX_LINE = 16 * 1024
"""Characters of a line that are kept; a longer one is cut, not collected in memory."""


def redact(text: str, secret: str | None) -> str:
    """``text`` with every occurrence of ``secret`` replaced."""
    return text.replace(secret, HIDDEN) if secret else text


class Lines:
    """Splits a stream of bytes into lines, each without ``secret``.

    A carriage return ends a line too: progress bars redraw theirs with it.
    """

    def __init__(self, secret: str | None) -> None:
        self._secret = secret
        # So much more is collected that a key which begins within the kept part is seen whole.
        self._limit = MAX_LINE + len(secret or "")
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The lines that ``chunk`` completes, without those that are blank."""
        *whole, rest = chunk.replace(b"\r", b"\n").split(b"\n")
        for part in whole:
            self._keep(part)
            yield from self.finish()
        self._keep(rest)

    def finish(self) -> Iterator[str]:
        """What is left without an end of line."""
        cut = len(self._pending) >= self._limit
        text = redact(self._pending.decode(errors="replace"), self._secret).rstrip()
        self._pending.clear()
        if cut:
            # The last characters could be the beginning of a key.
            text = text[: max(0, len(text) - len(self._secret or ""))] + " [cut]"
        if text:
            yield text

    def _keep(self, part: bytes) -> None:
        self._pending += part[: self._limit - len(self._pending)]
