# SPDX-License-Identifier: Apache-2.0
"""How the supervisor asks the engine that it has started."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from kimi_k3.words.tls import unchecked


def engine_client(
    engine_url: str,
    *,
    timeout: float,
    headers: Mapping[str, str] | None = None,
    transport: httpx.BaseTransport | None = None,
) -> httpx.Client:
    """A client of the engine at ``engine_url``; its paths are relative to that.

    The operator's proxy settings are not for this machine itself. A certificate is not checked: it is the
    operator's, for the name by which others come, and who answers is a child of this process.
    """
    return httpx.Client(
        base_url=engine_url,
        timeout=timeout,
        headers=headers,
        transport=transport,
        verify=unchecked() if engine_url.startswith("https:") else True,
        trust_env=False,
    )
