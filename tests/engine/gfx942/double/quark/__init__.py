# SPDX-License-Identifier: Apache-2.0
"""A double of amd-quark: vLLM looks whether it is there before it emulates MXFP4."""
