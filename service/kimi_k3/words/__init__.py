# SPDX-License-Identifier: Apache-2.0
"""The words that all rooms share: phases, weights, environment variables."""
