# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM as a child, follows its phases, drains it and explains its death."""
