# SPDX-License-Identifier: Apache-2.0
"""What compilers make of the kernel for GPUs that are not here: registers, widths and order of its accesses.

The shapes are those of Kimi-K3's matrices, expert parallel over 8 (112 and 96 groups to a row) and tensor
parallel over 8 (112 and 12), in the arguments that :func:`gpu.launch` passes.
"""

from __future__ import annotations

import inspect
import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernel is written in Triton")

import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kimi_k3.conversion import gpu, kernel, kernel_groups
from kimi_k3.conversion.candidates import mse_rule
from kimi_k3.conversion.kernel_tables import kernel_tables

#: By groups of a row, rows of an expert.
ROWS = {112: 6144, 96: 3584, 12: 3584}

_POINTERS = {
    "packed": "*i32",
    "e8m0": "*u8",
    "out": "*i32",
    "scales": "*u16",
    "choices_table": "*i32",
    "error_table": "*i32",
    "flags_out": "*i64",
    "square_out": "*fp64",
    "energy_out": "*fp64",
    "error_out": "*i32",
}


@cache
def _compile(backend: str, groups: int, **options: int) -> Any:
    """The first launch of a conversion in place."""
    if backend not in backends:
        pytest.skip(f"this Triton has no {backend} compiler")
    target = GPUTarget("hip", "gfx942", 64) if backend == "amd" else GPUTarget("cuda", 90, 32)
    shape = gpu.Shape.of(ROWS[groups], groups)
    numbers = {
        "rows": ROWS[groups],
        "allowed": 0,
        **{f"mask_{number}": mask for number, mask in enumerate(kernel_groups.BIT_MASKS)},
        "fifteen": kernel.ROW_MASK,
    }
    constants = {
        "unusual_parts": None,
        "TABLES": kernel_tables(mse_rule()),
        "GROUPS": groups,
        "STRIPS": shape.strips,
        "PAIRS": shape.pairs,
        "ROUNDS": shape.rounds,
        "AITER": True,
        "IN_PLACE": True,
        "ORDINARY": True,
        "PTX": backend == "nvidia",
    }
    names = kernel.convert_parts.arg_names
    # As Triton specialises a launch: tensors are aligned, and on AMD it matters that none has 2 GiB.
    pointer = [["tt.divisibility", 16], *([["tt.pointer_range", 32]] if backend == "amd" else [])]
    attributes = {(names.index(name),): pointer for name in _POINTERS}
    attributes |= {
        (names.index(name),): [["tt.divisibility", 16]] for name, value in numbers.items() if value % 16 == 0
    }
    source = ASTSource(
        kernel.convert_parts,
        {name: _POINTERS.get(name, "i32" if name in numbers else "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        attributes,
    )
    warps = shape.warps(target.warp_size)
    return triton.compile(
        source, target=target, options={"num_warps": warps, "enable_fp_fusion": True, **options}
    )


def _places(assembly: str, instruction: str, function: Any = None) -> list[int]:
    """Lines of instructions, of all or of those that were made of a function of the kernel."""
    lines, first = inspect.getsourcelines((function or kernel.convert_parts).fn)
    here = {(Path(kernel.__file__).name, first + line) for line in range(len(lines))}
    files = dict(re.findall(r'^\t\.file\t(\d+) .*"([^"\n]+)"$', assembly, re.MULTILINE))
    found, place = [], ("", 0)
    for number, text in enumerate(assembly.splitlines()):
        if location := re.match(r"\s+\.loc\s+(\d+) (\d+)", text):
            place = (files[location[1]], int(location[2]))
        elif re.match(rf"\s+{instruction}\b", text) and (function is None or place in here):
            found.append(number)
    return found


@pytest.mark.parametrize("groups", ROWS)
def test_on_mi300_everything_stays_in_registers(groups: int) -> None:
    """A word spilt to memory is written and read once more, which is what the kernel was made to avoid."""
    assembly = _compile("amd", groups).asm["amdgcn"]
    figures = {name: int(value) for name, value in re.findall(r"\.(\w+): +(\d+)$", assembly, re.MULTILINE)}
    print({name: value for name, value in figures.items() if "gpr" in name})
    assert figures["vgpr_spill_count"] == figures["sgpr_spill_count"] == 0
    assert figures["private_segment_fixed_size"] == 0
    # Of 512, so that two wavefronts at a time share a SIMD.
    assert figures["vgpr_count"] + figures["agpr_count"] <= 256


@pytest.mark.parametrize("groups", ROWS)
def test_on_mi300_a_group_is_one_load_and_no_thread_waits_for_another(groups: int) -> None:
    """Narrower loads, or an exchange between threads for the layout's sake, would bound the speed."""
    assembly = _compile("amd", groups).asm["amdgcn"]
    chunks = gpu.Shape.of(ROWS[groups], groups).kept_words // 4
    loads = _places(assembly, r"(global|buffer)_load_\w+", kernel._load_words)
    assert loads == _places(assembly, r"(global|buffer)_load_dwordx4", kernel._load_words)
    assert len(loads) == chunks
    stores = _places(assembly, r"(global|buffer)_store_\w+", kernel._store_words)
    assert stores == _places(assembly, r"(global|buffer)_store_dwordx2", kernel._store_words)
    # Two words of flags, two sums and the largest error meet in local memory, nothing else.
    assert len(_places(assembly, r"ds_read\w*")) == len(_places(assembly, r"ds_write\w*")) == 5
    assert len(_places(assembly, "s_barrier")) <= 8
    scale_stores = _places(assembly, r"(global|buffer)_store_short")
    assert len(scale_stores) == chunks
    assert max(scale_stores) < min(_places(assembly, r"(ds_\w+|s_barrier)"))


@pytest.mark.parametrize("groups", ROWS)
def test_on_mi300_all_words_of_a_part_are_loaded_before_one_is_stored(groups: int) -> None:
    """In place, a thread stores where another one loads, and only the barrier of the sum orders the two."""
    assembly = _compile("amd", groups).asm["amdgcn"]
    loads = _places(assembly, r"(global|buffer)_load_\w+", kernel._load_words)
    stores = _places(assembly, r"(global|buffer)_store_\w+", kernel._store_words)
    barriers = _places(assembly, "s_barrier")
    assert max(loads) < min(barriers) < min(stores)
    # What a thread has asked for is there when it passes the barrier: it sums up what became of it.
    waits = _places(assembly, r"s_waitcnt vmcnt")
    assert any(max(loads) < wait < min(barriers) for wait in waits)


def _dissected(groups: int, **options: int) -> tuple[int, int, Counter[str]]:
    """Registers, bytes of stack and instructions of the kernel for an H100 or H200."""
    compiled = _compile("nvidia", groups, **options)
    tool = Path(inspect.getfile(backends["nvidia"].compiler)).parent / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton comes without cuobjdump")
    file = Path(compiled.metadata_group[f"{compiled.metadata.name}.cubin"])

    def say(option: str) -> str:
        return subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout

    usage = dict(re.findall(r"(REG|STACK):(\d+)", say("-res-usage")))
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9.]*)", say("-sass"))
    print(options, usage)
    return int(usage["REG"]), int(usage["STACK"]), Counter(instructions)


def test_on_h100_everything_stays_in_registers_if_it_may() -> None:
    """The longest row has the most words to keep: with 128 registers two programs share a multiprocessor."""
    registers, stack, instructions = _dissected(112)
    assert registers <= 128
    assert stack == 0
    assert not any(name.startswith(("STL", "LDL")) for name in instructions)
    # A group's words, and three quarters of a row of the table of choices.
    assert instructions["LDG.E.128"] == 4 * gpu.Shape.of(ROWS[112], 112).row_chunks


def test_on_h100_few_registers_are_spilt_for_a_third_program() -> None:
    """At 80 registers three programs share a multiprocessor, measured faster though each spills a few words.

    Many more would mean that the words which are kept go through memory a second time.
    """
    registers, _, instructions = _dissected(96, maxnreg=gpu._REGISTERS_IN_PLACE)
    assert registers <= gpu._REGISTERS_IN_PLACE
    assert sum(count for name, count in instructions.items() if name.startswith("STL")) <= 16
    assert sum(count for name, count in instructions.items() if name.startswith("LDL")) <= 16
