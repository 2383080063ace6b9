"""The C++ kernels under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer.

    run.py [--build FOLDER] [--quick]

Two programs make random calls: a driver in C++ that knows no torch, and Python with a sanitized build of the extension.
First each must report faults planted in a copy of the sources, then it must report nothing of the sources as they are.
The exit status is 1 if either fails. `--quick` is the driver under AddressSanitizer alone.

torch and Python are not built for the sanitizers: accesses of theirs go unseen, what they allocate is guarded.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "csrc"
COMPILER = shlex.split(os.environ.get("CXX", "")) or ["g++"]
KERNELS = ("kernels_default", "kernels_avx2", "kernels_avx512")
# As in setup.py but for the optimisation, of which -O1 keeps reports readable and -O0 compiles in half the time.
FLAGS = (
    "-std=c++17", "-g1", "-fno-omit-frame-pointer", "-fPIC", "-pthread", "-fopenmp-simd", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", f"-I{HERE}",
)  # fmt: skip
QUICK_CALLS = ("500", "1")


@dataclass(frozen=True)
class Sanitizer:
    """One way to build, and what the programs run with."""

    name: str
    flags: tuple[str, ...]
    runtime: str
    options: dict[str, str]
    calls: tuple[str, ...]
    """Arguments of the driver."""
    python_calls: tuple[str, ...]
    """Arguments of python_calls.py behind the library."""


ADDRESS = Sanitizer(
    "address",
    ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-include{HERE / 'fence.h'}"),
    "libasan.so",
    # Python itself leaves memory behind when it ends; tests/test_leaks.py counts what calls leave.
    {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    ("6000", "1"),
    ("400", "1", "1"),
)
THREAD = Sanitizer(
    "thread",
    ("-fsanitize=thread",),
    "libtsan.so",
    {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66", "OMP_NUM_THREADS": "2"},
    ("250", "1", "threads"),
    ("24", "1", "3"),
)


@dataclass(frozen=True)
class Fault:
    """A change of one source file that a sanitizer must report."""

    what: str
    sanitizer: Sanitizer
    file: str
    old: str
    new: str
    report: str


FAULTS = (
    Fault(
        "reads an entry past a row", ADDRESS, "entries.h",
        "widen_all(source, count, out, widen_bfloat16);", "widen_all(source + 1, count, out, widen_bfloat16);",
        "heap-buffer-overflow|use-after-poison",
    ),
    Fault(
        "writes a bin past the histogram", ADDRESS, "filter.h",
        "bin < BINS; ++bin) bins[bin] = 0.0;", "bin <= BINS; ++bin) bins[bin] = 0.0;", "use-after-poison",
    ),
    Fault(
        "shifts by more than the width of a word", ADDRESS, "adjust.h",
        "(allowed[token / WORD]) >> lane;", "(allowed[token / WORD]) >> (lane + WORD);", "shift exponent",
    ),
    Fault(
        "shards of a row write one variable", THREAD, "unfiltered.h",
        "    references[shard] = sum.reference;", "    references[0] = sum.reference;",
        "data race",
    ),
    Fault(
        "callers share a buffer", THREAD, "emit.h",
        "  alignas(64) float weights[SHARD];\n  shard_weights(", "  static float weights[SHARD];\n  shard_weights(",
        "data race",
    ),
)  # fmt: skip


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_compiler(*words: str | Path) -> None:
    """Run the compiler; raise CalledProcessError if it fails, which it explains itself."""
    subprocess.run([*COMPILER, *map(str, words)], check=True)


def compile_source(flags: Sequence[str], source: Path, target: Path, headers: Path) -> None:
    """Compile one source file against the headers in a folder."""
    extra: list[str] = []
    if source.name == "operators.cpp":
        from torch.utils.cpp_extension import include_paths

        extra = ["-DTORCH_TARGET_VERSION=0x020a000000000000", *(f"-isystem{path}" for path in include_paths())]
    target.parent.mkdir(parents=True, exist_ok=True)
    run_compiler(*FLAGS, *flags, f"-I{headers}", *extra, "-c", source, "-o", target)


def link_extension(sanitizer: Sanitizer, objects: Sequence[Path], target: Path) -> None:
    """Link the extension."""
    from torch.utils.cpp_extension import library_paths

    libraries = [f"-L{path}" for path in library_paths()] + ["-lc10", "-ltorch", "-ltorch_cpu"]
    run_compiler(*sanitizer.flags[:1], "-shared", *objects, *libraries, "-o", target)


def file_of_compiler(name: str) -> str:
    """Return where the compiler keeps one of its libraries; raise FileNotFoundError if it has none."""
    found = subprocess.run([*COMPILER, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        raise FileNotFoundError(f"{shlex.join(COMPILER)} has no {name}: install GCC's sanitizer runtimes, or set CXX")
    return found


def planted(fault: Fault, folder: Path) -> Path:
    """Return a copy of the sources with a fault in it; raise ValueError where the text to change is not there."""
    copy = folder / "csrc"
    shutil.copytree(SOURCES, copy)
    text = (copy / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.what}: expected {fault.old!r} once in {fault.file}, got {text.count(fault.old)}")
    (copy / fault.file).write_text(text.replace(fault.old, fault.new))
    return copy


class Runner:
    """Builds and runs the programs under one sanitizer, in one folder."""

    def __init__(self, sanitizer: Sanitizer, folder: Path, quick: bool) -> None:
        self.sanitizer, self.folder, self.quick = sanitizer, folder / sanitizer.name, quick
        self.faults = [fault for fault in FAULTS if fault.sanitizer is sanitizer]
        self.programs = ("driver",) if quick else ("driver", "python")

    def build(self) -> None:
        """Compile all, several files at a time, and link each program with and without faults."""
        sources = [*(SOURCES / f"{name}.cpp" for name in KERNELS), HERE / "driver.cpp"]
        if not self.quick:
            sources += [SOURCES / "operators.cpp", SOURCES / "deliver.cpp", HERE / "openmp.cpp"]
        jobs = [(source, self.folder / f"{source.stem}.o", SOURCES) for source in sources]
        for number, fault in enumerate(self.faults):
            copy = planted(fault, self.folder / f"fault{number}")
            jobs.append((copy / "kernels_default.cpp", copy.parent / "kernels_default.o", copy))
        flags = ("-O0" if self.quick else "-O1", *self.sanitizer.flags)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: compile_source(flags, *job), jobs))
        for folder in (self.folder, *(self.folder / f"fault{number}" for number in range(len(self.faults)))):
            kernels = [folder / "kernels_default.o", *(self.folder / f"{name}.o" for name in KERNELS[1:])]
            run_compiler(
                *self.sanitizer.flags[:1], self.folder / "driver.o", *kernels, "-pthread", "-o", folder / "driver"
            )
            if not self.quick:
                others = [self.folder / f"{name}.o" for name in ("operators", "deliver")]
                link_extension(self.sanitizer, [*others, *kernels], folder / "extension.so")
        if not self.quick:
            run_compiler("-shared", self.folder / "openmp.o", "-ldl", "-o", self.folder / "openmp.so")

    def run(self, program: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program to its end or to the first report."""
        options = {**os.environ, **self.sanitizer.options, **environment}
        if program == "driver":
            calls = QUICK_CALLS if self.quick else self.sanitizer.calls
            command = [str(folder / "driver"), *calls]
        else:
            # Without the C++ runtime in memory the sanitizers cannot follow exceptions.
            first = [file_of_compiler(self.sanitizer.runtime), file_of_compiler("libstdc++.so.6")]
            if self.sanitizer is THREAD:
                first.append(str(self.folder / "openmp.so"))
            options["LD_PRELOAD"] = " ".join(first)
            script = str(HERE / "python_calls.py")
            command = [sys.executable, script, str(folder / "extension.so"), *self.sanitizer.python_calls]
        return subprocess.run(command, env=options, capture_output=True, text=True, timeout=600)

    def check_faults(self) -> bool:
        """Return whether every program reports every planted fault."""
        good = True
        for number, fault in enumerate(self.faults):
            for program in self.programs:
                # Only this build of the kernels carries the fault.
                ended = self.run(program, self.folder / f"fault{number}", SPECKER_CPU_CAPABILITY="default")
                reported = ended.returncode != 0 and re.search(fault.report, ended.stderr) is not None
                status = f"NOT REPORTED (status {ended.returncode})\n{ended.stderr[-3000:]}"
                verdict = "reported" if reported else status
                say(f"{self.sanitizer.name}, {program}: planted fault, {fault.what}: {verdict}")
                good &= reported
        return good

    def check_sources(self) -> bool:
        """Return whether no program reports anything of the sources as they are."""
        good = True
        for program in self.programs:
            began = time.monotonic()
            ended = self.run(program, self.folder)
            clean = ended.returncode == 0
            verdict = "nothing to report" if clean else f"status {ended.returncode}\n{ended.stderr}"
            say(f"{self.sanitizer.name}, {program}: {verdict} ({time.monotonic() - began:.0f} s)")
            good &= clean
        return good


def main() -> int:
    """Build and run all; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, help="a new folder to build in; without it build/sanitize, made anew")
    parser.add_argument("--quick", action="store_true", help="the driver under AddressSanitizer alone")
    options = parser.parse_args()
    build = (options.build or ROOT / "build" / "sanitize").resolve()
    if options.build is None:
        shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    good = True
    for sanitizer in (ADDRESS,) if options.quick else (ADDRESS, THREAD):
        runner = Runner(sanitizer, build, options.quick)
        began = time.monotonic()
        runner.build()
        say(f"{sanitizer.name}: built ({time.monotonic() - began:.0f} s)")
        good &= runner.check_faults()
        good &= runner.check_sources()
    say("sanitize: clean" if good else "sanitize: FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
