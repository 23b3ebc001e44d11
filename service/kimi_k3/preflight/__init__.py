# SPDX-License-Identifier: Apache-2.0
"""Checks on this machine before vLLM starts. They import neither torch nor vLLM."""
