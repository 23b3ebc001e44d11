# SPDX-License-Identifier: Apache-2.0
"""What the engine plugin relies on in vLLM's source: data per version, compared without importing."""
