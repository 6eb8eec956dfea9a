"""Compiles the catalogue for chips that are not here, and reads what became of it in the machine code.

`python -m worker.cuda.compile sm_90 sm_80 [--only FAMILY]` prints one JSON object a line. A process
of its own: kernels that were defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker.cuda.catalog import Variant, variants

WARP = 32


@dataclass(frozen=True, kw_only=True)
class Report:
    """registers: of a thread. shared: bytes of a program. spills: instructions that access spilled registers. products:
    wgmma, mma or "" for none. wide: instructions that load 16 bytes from global memory, of `loads` that load any."""

    family: str
    shape: str
    arch: str
    warps: int
    registers: int
    shared: int
    spills: int
    products: str
    loads: int
    wide: int


def compile_variant(variant: Variant, arch: int) -> Report:
    """Triton to machine code, for compute capability `arch` (80: Ampere, 90: Hopper)."""
    names = variant.kernel.arg_names
    source = ASTSource(
        fn=variant.kernel,
        signature={name: "constexpr" if name in variant.constants else variant.types[name] for name in names},
        constexprs={name: variant.constants[name] for name in names if name in variant.constants},
        # Tensors begin at multiples of 16 bytes, as torch allocates them; loads are as wide as that lets them be.
        attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name.endswith("_ptr")},
    )
    made = triton.compile(source, target=GPUTarget("cuda", arch, WARP), options=variant.options)
    code = disassemble(made.asm["cubin"])
    loads = re.findall(r"\b(?:LDG|LDGSTS)\.[\w.]*", code)
    return Report(
        family=variant.family,
        shape=variant.shape,
        arch=f"sm_{arch}",
        warps=made.metadata.num_warps,
        registers=registers_of(made.asm["cubin"]),
        shared=made.metadata.shared,
        spills=len(re.findall(r"\b(?:STL|LDL)\b", code)),
        products="wgmma" if re.search(r"\b[HQ]GMMA\b", code) else "mma" if re.search(r"\b[HQ]MMA\b", code) else "",
        loads=len(loads),
        wide=sum(".128" in load for load in loads),
    )


def disassemble(cubin: bytes) -> str:
    """The machine code's text."""
    return _tool(triton.knobs.nvidia.nvdisasm.path, [], cubin)


def registers_of(cubin: bytes) -> int:
    """Registers of a thread, from the binary's own record."""
    found = re.search(r"REG:(\d+)", _tool(triton.knobs.nvidia.cuobjdump.path, ["--dump-resource-usage"], cubin))
    assert found, "cuobjdump tells of no registers"
    return int(found[1])


def _tool(path: str, options: list[str], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def main(archs: Iterable[str], only: str) -> None:
    """Prints a report for each kernel and chip; FP8 kernels are left out on chips that have none."""
    for name in archs:
        arch = int(name.removeprefix("sm_"))
        for variant in variants(arch):
            if arch >= variant.needs and variant.family.startswith(only):
                print(json.dumps(asdict(compile_variant(variant, arch))), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("archs", nargs="+")
    parser.add_argument("--only", default="", help="the beginning of a family's name")
    wanted = parser.parse_args()
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    main(wanted.archs, wanted.only)
