# SPDX-License-Identifier: Apache-2.0
"""The GPU conversion on the host, by Triton's interpreter, without a trace of it left for other tests.

Triton decides whether a function is interpreted when its decorator runs. So the modules are imported anew,
and the functions of Triton's own library are wrapped here, since another test may have imported them to
compile. While it interprets, Triton also replaces attributes of its language, not all of which it puts back.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import kimi_k3.conversion

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_MODULES = ("kernel_groups", "kernel", "gpu")
#: Whatever the interpreter, or this module, gives other attributes.
_PATCHED: tuple[Any, ...] = (
    tl,
    tl.core,
    tl.math,
    tl.standard,
    tl.tensor,
    tl.condition,
    tl.dtype,
    tl.core.tensor_descriptor_base,
)


@contextmanager
def interpreted() -> Iterator[Any]:
    """The module ``kimi_k3.conversion.gpu`` with a kernel that takes tensors on the CPU."""
    attributes = [dict(vars(owner)) for owner in _PATCHED]
    modules = {name: sys.modules.pop(f"kimi_k3.conversion.{name}", None) for name in _MODULES}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            _wrap_library()
            yield [importlib.import_module(f"kimi_k3.conversion.{name}") for name in _MODULES][-1]
    finally:
        for name, module in modules.items():
            _put_back(name, module)
        for owner, values in zip(_PATCHED, attributes, strict=True):
            _restore(owner, values)
        # Rewritten functions refer to attributes that are gone now.
        InterpretedFunction.rewritten_fn.clear()


def _put_back(name: str, module: ModuleType | None) -> None:
    if module is None:
        sys.modules.pop(f"kimi_k3.conversion.{name}", None)
        vars(kimi_k3.conversion).pop(name, None)
    else:
        sys.modules[module.__name__] = module
        setattr(kimi_k3.conversion, name, module)


def _wrap_library() -> None:
    wrapped: dict[int, Any] = {}
    for module in (tl.standard, tl.math, tl.core, tl):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, wrapped.setdefault(id(value), InterpretedFunction(value.fn)))


def _restore(owner: Any, attributes: dict[str, Any]) -> None:
    for name, value in dict(vars(owner)).items():
        if name not in attributes:
            delattr(owner, name)
        elif value is not attributes[name]:
            setattr(owner, name, attributes[name])
