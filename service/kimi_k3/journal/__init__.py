# SPDX-License-Identifier: Apache-2.0
"""The state directory: models, writer and reader. See :mod:`kimi_k3.journal.models`."""
