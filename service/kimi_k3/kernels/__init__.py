# SPDX-License-Identifier: Apache-2.0
"""Kernels ahead of time: which ones a profile needs, compiled by AITER's own entry, and what is missing.

Nothing here imports AITER, FlyDSL or torch: AITER is found by its files and runs in processes of its own.
None of it has run with a real AITER yet, only with doubles written after its source.
"""
