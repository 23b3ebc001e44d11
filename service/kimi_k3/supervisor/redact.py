# SPDX-License-Identifier: Apache-2.0
"""Bytes of a pipe to printable lines without secrets. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

HIDDEN = "***"
MAX_LINE = 16 * 1024
"""Characters of a line that are kept; a longer one is cut, not collected in memory."""

SECRET_VARIABLES = ("VLLM_API_KEY", "KIMI_K3_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Whose values are hidden wherever they are printed."""

LEAST_SECRET = 8
"""A variable's value with fewer characters is no secret, and hiding it would mangle lines."""

SHAPE_CHARACTERS = 512
"""So long is a secret that is known by its shape only, at most."""

_VALUE = r"[^\s'\",;\]})]+"
_SHAPES = (
    # A header, as a client writes it or as ASGI lists it.
    re.compile(rf"(authorization['\"]?\s*[:=,]\s*b?['\"]?(?:bearer|basic)\s+){_VALUE}", re.IGNORECASE),
    # A flag in a command line or in a list of arguments, and how vLLM prints what it was given.
    re.compile(rf"(--api-key['\"]?(?:=|,\s*|\s+)['\"]?){_VALUE}"),
    re.compile(rf"(api_key['\"]?\s*[:=]\s*(?:\[\s*)?['\"]){_VALUE}"),
    re.compile(r"()\bhf_[A-Za-z0-9]{16,}"),
)


class Secrets:
    """What may not be printed: some values, and whatever has the shape of a key.

    Args:
        values: hidden wherever they stand; empty ones are left out.
    """

    def __init__(self, values: Iterable[str | None] = ()) -> None:
        # The longest first: one may be a part of another.
        self._values = sorted({value for value in values if value}, key=len, reverse=True)
        self.most = max([SHAPE_CHARACTERS, *map(len, self._values)])

    @classmethod
    def of(cls, api_key: str | None, environment: Mapping[str, str]) -> Secrets:
        """The API key, and what the engine's environment holds besides."""
        values = [environment.get(name, "").strip() for name in SECRET_VARIABLES]
        return cls([api_key, *(value for value in values if len(value) >= LEAST_SECRET)])

    def hide(self, text: str) -> str:
        """``text`` without secrets, otherwise unchanged."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        for shape in _SHAPES:
            text = shape.sub(rf"\g<1>{HIDDEN}", text)
        return text


class Lines:
    """Splits a stream of bytes into lines, each without ``secrets``.

    A carriage return ends a line too: progress bars redraw theirs with it.
    """

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        # So much more is collected that a key which begins within the kept part is seen whole.
        self._limit = MAX_LINE + secrets.most
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
        text = self._secrets.hide(self._pending.decode(errors="replace")).rstrip()
        self._pending.clear()
        if cut:
            # The last characters could be the beginning of a key.
            text = text[: max(0, len(text) - self._secrets.most)] + " [cut]"
        if text:
            yield text

    def _keep(self, part: bytes) -> None:
        self._pending += part[: self._limit - len(self._pending)]
