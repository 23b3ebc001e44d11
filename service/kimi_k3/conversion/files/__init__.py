# SPDX-License-Identifier: Apache-2.0
"""``convert-report`` and ``convert-file``: the conversion of what is on disk, without an engine."""
