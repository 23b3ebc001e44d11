# SPDX-License-Identifier: Apache-2.0
"""MXFP4 -> int4_per_group_32: the mathematics, its implementations, and what it costs."""
