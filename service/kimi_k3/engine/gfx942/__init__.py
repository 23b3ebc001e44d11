# SPDX-License-Identifier: Apache-2.0
"""vLLM on gfx942 (MI325X, MI300X): AITER's int4 kernels, and guards against what fails or lies there.

Nothing of this has run on such a GPU. It is exercised with both supported versions of vLLM, a double of
AITER's Python surface and CPU tensors (``tests/engine/gfx942``).
"""
