"""Compiles the small kernels of `verify_into` for a GPU that is not there, and prints their names and registers.

Run as a process of its own: the interpreter is chosen when the kernels are imported.
"""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

from bench import gpu_code
from specker.kernels import prepare, verify_into
from specker.kernels.blocks import constant_names

# Pointers that may have several types take the one that has to be converted.
TYPES = {
    "temperatures_ptr": "*fp64", "draft_temperatures_ptr": "*fp64", "pairs_ptr": "*fp64", "temperature_ptr": "*fp32",
    "accept_uniforms_ptr": "*fp32", "emission_uniforms_ptr": "*fp32", "accept_probs_ptr": "*fp32",
    "output_token_ids_ptr": "*i32", "output_places_ptr": "*i32", "passed_total_ptr": "*i32",
    "accepted_total_ptr": "*i32", "emitted_total_ptr": "*i32", "status_total_ptr": "*i32", "status_ptr": "*i32",
}  # fmt: skip
CONSTANTS = {"FINAL": False, "PURPOSE": 1, "BLOCK_POSITIONS": prepare.POSITIONS}
KERNELS = (prepare.prepare_sequences, verify_into.deliver)


def compiled(kernel: Any, target: str, absent: tuple[str, ...] = ()) -> int:
    """Return the registers of a kernel, compiled with all inputs but those absent."""
    constants = {name: CONSTANTS[name] for name in constant_names(kernel)} | dict.fromkeys(absent)
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, "*i64" if name.endswith("_ptr") else "i32")
        for name in inspect.signature(kernel.fn).parameters
    }
    code = gpu_code.inspect_kernel(kernel, signature, constants, (), prepare.SMALL_LAUNCH, target)
    if code.narrow_products:
        raise SystemExit(f"{kernel.__name__}: 32-bit products in addresses: {code.narrow_products}")
    return code.registers


def main(targets: list[str]) -> None:
    """Compile each kernel with everything and with as little as an adapter gives."""
    for target in targets:
        for kernel in KERNELS:
            names = list(inspect.signature(kernel.fn).parameters)
            needed = {"output_token_ids_ptr", "token_ids_ptr", "num_accepted_ptr", "num_emitted_ptr", "status_ptr"}
            bare = tuple(name for name in names if name.endswith("_ptr") and name not in needed)
            for absent in ((), bare):
                sys.stdout.write(f"{target} {kernel.__name__} {compiled(kernel, target, absent)}\n")


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise SystemExit("TRITON_INTERPRET: expected it unset, the interpreter compiles nothing")
    main(sys.argv[1:])
