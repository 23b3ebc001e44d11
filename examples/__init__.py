# SPDX-License-Identifier: Apache-2.0
"""Programs beside the product, to be read and run."""
