"""What a call of the C++ backend allocates: next to nothing, however large its input."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A round of 1 GB on two threads; prints by how many bytes the resident memory of the process grows at its peak.
SCRIPT = """
import sys, torch, specker
from specker.bench import footprint
options = eval(sys.argv[1])
batch, gamma, vocab = 434, 4, 128_256
generator = torch.Generator().manual_seed(0)
target, draft = (
    (2.5 * torch.randn(1, rows, vocab, generator=generator)).bfloat16().repeat(batch, 1, 1)
    for rows in (gamma + 1, gamma)
)
tokens = draft[:1].float().argmax(-1).repeat(batch, 1)
# Every other sequence drafts from the target's own rows.
draft[::2] = target[::2, :gamma]
tokens[::2] = draft[:1].float().argmax(-1)
seed = torch.arange(batch)
assert target.nbytes + draft.nbytes >= 1e9
torch.set_num_threads(2)
with specker.backend("cpp"):
    call = lambda: specker.verify(tokens, target, draft, seed=seed, **options)
    accepted = call().num_accepted
    assert 0 < int(accepted.sum()) < batch * gamma
    print(footprint.peak_bytes(call, target.device))
"""
QUARTER_OF_A_MEGABYTE = 250_000


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("backend", ["cpp"])
@pytest.mark.parametrize(
    "options", ["{}", "{'top_k': 50, 'top_p': 0.95, 'temperature': 0.8}"], ids=["plain", "filters"]
)
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux tells the peak of a process' memory")
def test_a_round_of_a_gigabyte_takes_a_quarter_of_a_megabyte(options: str) -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT, options], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    # The results themselves are 30 kB of it.
    assert 0 <= int(ran.stdout) <= QUARTER_OF_A_MEGABYTE
