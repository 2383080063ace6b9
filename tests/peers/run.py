"""`make peers`: the engines' own tests, and comparisons with their own kernels, through the adapters.

Sources come from the package index into build/peers. An engine whose source cannot be had is skipped with the reason;
every test that does not run is listed with its own (see not_run.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import sources

HERE = Path(__file__).parent


class Part(NamedTuple):
    """One run of pytest."""

    title: str
    engine: str
    tests: str
    """A file of ours, or one in the engine's source."""
    plugin: str | None = None


PARTS = (
    Part("SGLang's kernels against the adapters", "sglang", "compare_sglang.py"),
    Part("vLLM's kernels against the adapters", "vllm", "compare_vllm.py"),
    Part("FlashInfer's test of its chain sampler", "flashinfer", "tests/test_sampling.py", "flashinfer_plugin"),
    Part("vLLM's tests of its first runner", "vllm", "tests/v1/sample/test_rejection_sampler.py", "vllm_plugin"),
    Part(
        "vLLM's tests of its second runner", "vllm", "tests/v1/spec_decode/test_rejection_sampler_utils.py",
        "vllm_plugin",
    ),
)  # fmt: skip


def run(part: Part) -> str:
    """Run one part and return how it ended."""
    source = sources.SOURCES[part.engine]
    reason = sources.fetch(source)
    if reason:
        return f"skipped: the source of {source.package} {source.version} is absent ({reason})"
    root = HERE if part.plugin is None else source.folder
    if not (root / part.tests).is_file():
        return f"skipped: {source.package} {source.version} holds no {part.tests}"
    command = [
        sys.executable, "-m", "pytest", "--noconftest", "-c", os.devnull, f"--rootdir={root}", "-p", "no:cacheprovider",
        "-q", "-rs", "--import-mode=importlib", "-W", "ignore", part.tests,
    ]  # fmt: skip
    if part.plugin is not None:
        command += ["-p", part.plugin]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    code = subprocess.run(command, cwd=root, env=environment, check=False).returncode
    return "passed" if code == 0 else f"failed with {code}"


def say(line: str) -> None:
    """Write a line ahead of what the next process writes."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run every part and return the number that failed."""
    outcomes = {}
    for part in PARTS:
        source = sources.SOURCES[part.engine]
        say(f"\n== {part.title} ({source.package} {source.version})")
        outcomes[part.title] = run(part)
    say("")
    for title, outcome in outcomes.items():
        say(f"{title}: {outcome}")
    return sum(outcome.startswith("failed") for outcome in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
