# SPDX-License-Identifier: Apache-2.0
"""What an operator, a probe and Prometheus can ask about a deployment; see :mod:`kimi_k3.sidecar.app`.

The sidecar only reads the journal and asks the engine for its health. It is never in the path of a
request, and a deployment goes on serving without it.
"""
