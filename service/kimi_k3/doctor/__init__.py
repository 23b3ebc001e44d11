# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 doctor``: what the catalogue makes of a log, an exit code, or what a start left behind."""
