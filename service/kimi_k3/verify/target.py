# SPDX-License-Identifier: Apache-2.0
"""The deployment that is verified, as it is reached from here."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_k3.words.tls import trust

if TYPE_CHECKING:
    from kimi_k3.words.weights import Weights


@dataclass(frozen=True)
class Target:
    """A deployment as it is reached from here.

    Attributes:
        engine: URL of the API.
        sidecar: URL of the sidecar; ``None`` if there is none to ask.
        metrics: URL of vLLM's metrics.
        weights: what it should serve; ``None`` where either will do.
        api_key, token: what opens the two; ``None`` where nothing is asked for.
        authorities: whose certificates are trusted, a PEM file; ``None`` for the system's.
    """

    engine: str
    sidecar: str | None
    metrics: str
    weights: Weights | None
    api_key: str | None
    token: str | None
    authorities: Path | None = None

    def trusted(self, url: str) -> ssl.SSLContext | bool:
        """What httpx checks a certificate by."""
        return trust(url, self.authorities) if url.startswith("https:") else True

    @property
    def headers(self) -> dict[str, str]:
        """With which the API answers."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
