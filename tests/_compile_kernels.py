"""Compiles kernels for GPUs that are not there and prints, as JSON, what the generated code looks like.

Run as a process of its own: the interpreter is chosen when the kernels are imported.
"""

from __future__ import annotations

import json
import os
import sys

import triton
import triton.language as tl

from bench import codegen, gpu_code


@triton.jit
def narrow_offset(rows_ptr, stride, out_ptr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Address a row by a 32-bit product, the fault that `narrow_products` has to find, through a loop and a branch."""
    offset = tl.program_id(0) * stride
    for _ in range(stride):
        if offset > 5:
            offset += 1
    tl.store(out_ptr, tl.load(rows_ptr + offset.to(tl.int64)))


def main(target: str, names: list[str]) -> None:
    """Compile the kernels whose names are given, and print one JSON object a line, the faulty kernel first."""
    signature = {"rows_ptr": "*fp32", "stride": "i32", "out_ptr": "*fp32"}
    faulty = codegen.Kernel("narrow_offset", narrow_offset, signature, {}, (), 0, {})
    entries = [entry for entry in [*codegen.KERNELS, *codegen.ADJUSTED] if entry.name in names]
    for entry in [faulty, *entries]:
        code = gpu_code.inspect_kernel(
            entry.function, entry.signature, entry.constexprs, entry.divisible, entry.options, target
        )
        told = code._asdict() | {"name": entry.name, "loops": [loop._asdict() for loop in code.tile_loops()]}
        sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise SystemExit("TRITON_INTERPRET: expected it unset, the interpreter compiles nothing")
    main(sys.argv[1], sys.argv[2:])
