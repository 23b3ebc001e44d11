# SPDX-License-Identifier: Apache-2.0
"""Asking a live deployment whether it serves what it should."""
