# SPDX-License-Identifier: Apache-2.0
"""Kernels ahead of time: which ones a profile needs, compiled by AITER's own entry, and what is missing.

Nothing here imports AITER, FlyDSL or torch: AITER is found by its files and runs in processes of its own.
It has run with AITER v0.1.20 and FlyDSL 0.3.1, compiling for gfx942 without a GPU (docs/kernels.md); newer
generations of its entry only as doubles written after their source.
"""
