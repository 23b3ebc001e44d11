# SPDX-License-Identifier: Apache-2.0
"""Pure arithmetic: what vLLM is started with, and how long things may take."""
