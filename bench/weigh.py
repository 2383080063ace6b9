"""The time to weigh each logit that a round must read once: a plain C loop, which says how much a verify step adds.

A round must read each target row up to the one it emits from, and the draft row of each position it judges. The loop
takes their exponentials, vectorised by the compiler, and adds them up in float32:
no maximum, no validity, no decision, no second look at a row. It is a yardstick and decides nothing.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from .cases import Inputs, accepted
from .eager import PLAIN
from .provider import Call

YARDSTICK = "weigh each logit once"
_SOURCE = Path(__file__).with_name("weigh.c")
_FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-shared", "-fPIC")
_X86_FLAGS = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
_FUNCTIONS = {torch.float32: "weigh_float32", torch.bfloat16: "weigh_bfloat16"}


def obstacle(device: torch.device) -> str:
    """Say why the loop cannot run here; an empty string means that it can."""
    if device.type != "cpu":
        return "runs on the CPU"
    return "" if shutil.which("cc") else "needs a C compiler named cc"


def rows_read(inputs: Inputs) -> list[torch.Tensor]:
    """Return the rows that the round must read: of the target to the emitting one, of the draft to the judged one."""
    gamma = inputs.draft_token_ids.shape[1]
    rows: list[torch.Tensor] = []
    for sequence, count in enumerate(accepted(inputs, PLAIN).tolist()):
        rows += inputs.target_logits[sequence, : count + 1].unbind()
        rows += inputs.draft_logits[sequence, : min(count + 1, gamma)].unbind()
    return rows


def weigh(inputs: Inputs) -> Call:
    """Return the call that weighs the rows of a round.

    Raises:
        TypeError: the rows are of a dtype that the loop does not read.
    """
    dtype = inputs.target_logits.dtype
    if dtype not in _FUNCTIONS:
        raise TypeError(f"target_logits: expected dtype float32 or bfloat16, got {dtype}")
    function = getattr(_library(), _FUNCTIONS[dtype])
    # The rows stay alive with the call that holds their addresses.
    addressed = [(row, row.data_ptr()) for row in rows_read(inputs)]
    count = inputs.target_logits.shape[-1]
    return lambda: sum(function(address, count) for _, address in addressed)


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "weigh.so"
        subprocess.run(["cc", *_FLAGS, *_X86_FLAGS, "-o", built, _SOURCE], check=True)
        library = ctypes.CDLL(str(built))
    for name in _FUNCTIONS.values():
        function = getattr(library, name)
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_double
    return library
