# SPDX-License-Identifier: Apache-2.0
"""`kimi-k3 watch`: what the sidecar tells, in a terminal; see :mod:`kimi_k3.watch.command`.

It only asks the sidecar, with the sidecar's own models, and may do so from another machine.
"""
