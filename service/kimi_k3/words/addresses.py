# SPDX-License-Identifier: Apache-2.0
"""Where the servers listen unless told otherwise, and how they are named."""

from urllib.parse import urlsplit

HOST = "127.0.0.1"
"""Only this machine: whoever opens a server to others says so."""

ENGINE_PORT = 8000
"""vLLM's own default."""

SIDECAR_PORT = 8001

MASTER_PORT = 29501
"""Of the first node, where the ranks of all nodes find each other; vLLM's own default."""


def at_host(url: str, host: str) -> str:
    """``url`` with another host, a name or an address; scheme, port and path stay."""
    parts = urlsplit(url)
    port = "" if parts.port is None else f":{parts.port}"
    return parts._replace(netloc=f"{f'[{host}]' if ':' in host else host}{port}").geturl()
