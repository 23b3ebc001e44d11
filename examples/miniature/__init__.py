# SPDX-License-Identifier: Apache-2.0
"""A miniature Kimi-K3 that answers: its task, its training, its export. README.md tells how it was made."""
