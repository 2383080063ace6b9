"""Check and time the kernels on a GPU, in one command of at most six minutes: `python -m bench.gpu_check`.

Runs from the source tree with Python, torch and Triton alone. Prints what it finds and writes it, with the versions, as
one JSON file into bench/results. `--dry-run` runs as much as a processor can, in Triton's interpreter, on small shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

# The kernels read this when they are imported.
if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
    # Masked lanes hold infinities on purpose; numpy, which runs them in the interpreter, cannot know.
    warnings.simplefilter("ignore", RuntimeWarning)

import torch

RESULTS = Path(__file__).parent / "results"
SECONDS = 340.0


def versions(device: torch.device) -> dict[str, Any]:
    """Return what a figure depends on."""
    import triton

    import specker

    on_gpu = device.type == "cuda"
    return {
        "specker": specker.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "Triton's interpreter",
        "capability": list(torch.cuda.get_device_capability(device)) if on_gpu else None,
        "date": time.strftime("%Y-%m-%d"),
    }


def run_checks(device: torch.device, dry_run: bool, only: str | None = None) -> dict[str, Any]:
    """Return what every check found, by name; those that need a GPU are skipped without one."""
    from . import gpu_checks

    scale = gpu_checks.DRY_SCALE if dry_run or only else gpu_checks.GPU_SCALE
    found: dict[str, Any] = {}
    for name, check in gpu_checks.CHECKS.items():
        if only not in (None, name):
            continue
        start = time.monotonic()
        if dry_run and name in gpu_checks.NEED_A_GPU:
            found[name] = {"passed": True, "skipped": "needs a GPU"}
        else:
            found[name] = check(device, scale)
        found[name]["wall_seconds"] = round(time.monotonic() - start, 2)
        print(f"{name}: {found[name]}", flush=True)
    return found


def print_times(times: dict[str, Any]) -> None:
    """Print microseconds, share of the copy bandwidth and ratio to eager PyTorch, a line a case and provider."""
    print(f"copy bandwidth {times['copy_bandwidth'] / 1e12:.3f} TB/s")
    for record in times["cases"]:
        for name, seconds in record["seconds"].items():
            share, ratio = record["share_of_bandwidth"].get(name), record["eager_over_this"].get(name)
            told = "" if share is None else f"{share:7.1%} of the bandwidth {ratio:7.1f}x eager"
            print(f"{record['case']:28} {name:34} {seconds * 1e6:10.1f} us {told}")
    for name in times["left_out"]:
        print(f"{name}: left out, no time")


def main(arguments: list[str] | None = None) -> int:
    """Run everything; return 0 if all checks passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="use the interpreter and small shapes")
    parser.add_argument("--json", type=Path, default=None, help="where to write; bench/results/kernels_<device>.json")
    parser.add_argument("--only-small-grid", action="store_true", help="run the correctness grid on small shapes only")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + SECONDS
    if not options.dry_run and not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is false; --dry-run runs on the processor", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda")
    if options.only_small_grid:
        return 0 if run_checks(device, options.dry_run, only="grid")["grid"]["passed"] else 1
    from . import gpu_timing

    checks = run_checks(device, options.dry_run)
    times = gpu_timing.time_grid(device, dry_run=options.dry_run, deadline=deadline)
    print_times(times)
    told = versions(device)
    name = "dry_run" if options.dry_run else told["device"].lower().replace(" ", "_")
    path = options.json or RESULTS / f"kernels_{name}.json"
    path.write_text(json.dumps({"versions": told, "checks": checks, "times": times}, indent=1) + "\n")
    print(f"written to {path}")
    return 0 if all(check["passed"] for check in checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
