# SPDX-License-Identifier: Apache-2.0
"""The failure catalogue as data, and the matcher of log lines and exit codes."""
