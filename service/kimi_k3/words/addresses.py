# SPDX-License-Identifier: Apache-2.0
"""Where the servers listen unless told otherwise."""

HOST = "127.0.0.1"
"""Only this machine: whoever opens a server to others says so."""

ENGINE_PORT = 8000
"""vLLM's own default."""

SIDECAR_PORT = 8001
