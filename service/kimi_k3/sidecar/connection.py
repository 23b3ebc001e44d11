# SPDX-License-Identifier: Apache-2.0
"""One connection that may not wait for ever: uvicorn limits idle connections, not half a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""How long a client may take from its first byte, or from connecting, to the end of a request's headers."""

MAX_HEAD_BYTES = 16 * 1024
"""Of a request's line and headers together."""


class Connection(H11Protocol):
    """uvicorn's connection, closed when a request's headers take too long."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Something came: if it ends the headers, the client was fast enough."""
        waiting = self._deadline is not None
        super().data_received(data)
        if self._under_way():
            self._stop()
        elif not waiting:
            self._expect_head()

    def on_response_complete(self) -> None:
        """The next request may come, or half of it."""
        super().on_response_complete()
        if self._under_way():
            self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._stop()
        super().connection_lost(exc)

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: such a wish may be ignored, and uvicorn would advise what to install."""

    def _under_way(self) -> bool:
        """Whether a request's headers are there and its answer is not."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        self._stop()
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
