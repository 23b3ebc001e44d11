# SPDX-License-Identifier: Apache-2.0
"""Named deployments as data. See :mod:`kimi_k3.profiles.schema` and the YAML files beside it."""
