"""What the machine code of the CUDA kernels costs, by count: no GPU is needed, none is measured.

    python scripts/sass_report.py [--arch sm_90 sm_100a] [PATTERN]

Kernels are compiled as on a GPU, by NVRTC, and disassembled by nvdisasm (of a CUDA toolkit, or pip
install nvidia-cuda-nvdisasm). A *hot loop* is an innermost loop with 16-byte loads from global
memory, or one that waits for copies of masters in shared memory which were begun before it, less
the loops inside: what full tiles of aligned FP32 masters run through. All of its instructions are
counted, those that it may jump over too, a quad: four elements of each lane of a warp.

A bound is the time of the busiest of memory, issue and pipes a quad, in clocks of one
multiprocessor. What it leaves out: what a tile costs outside of its loop, and waiting. Whether
enough reads are under way to hide that is said by the bytes in flight: at their most, and on
average over the instructions of the loop.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from zerocast.backends.cuda.compiler import compile_text
from zerocast.backends.cuda.kernel_sources import cuda_sources

# --- what chips do in a clock ---


@dataclass(frozen=True)
class Chip:
    """A GPU by its published figures.

    Attributes:
        name: of the GPU.
        bytes_per_clock: of memory, for each multiprocessor: bandwidth / multiprocessors / boost
            clock.
        in_flight: KiB that a multiprocessor must have under way to draw that much, at 1,350 clocks
            of latency under load.
    """

    name: str
    bytes_per_clock: float
    in_flight: float


def chip(name: str, bandwidth: float, multiprocessors: int, clock: float) -> Chip:
    """Of bytes and clocks a second."""
    rate = bandwidth / multiprocessors / clock
    return Chip(name, rate, rate * 1350 / 1024)


CHIPS = {
    "sm_90": chip("H200", 4.8e12, 132, 1.98e9),
    "sm_100a": chip("B200", 8.0e12, 148, 1.965e9),
}

# Warp instructions a clock and multiprocessor ("Arithmetic Instructions" in the CUDA C++
# Programming Guide), and the opcodes that a pipe executes. A load of 16 bytes a lane takes four.
RATES = {"integer": 2, "multiply-add": 4, "integer multiply": 2, "special": 0.5, "memory": 1}
PIPES = {
    "integer": "LOP3 VIMNMX VIMNMX3 SHF LEA ISETP VIADD VIADDMNMX IADD3 IADD PRMT SEL PLOP3 F2FP "
    "FSETP FMNMX FMNMX3 FSEL P2R R2P IABS BMSK SGXT MOV FCHK CS2R VOTE VOTEU",
    "multiply-add": "FMUL FADD FFMA HADD2 HFMA2 HMUL2 FADD2 FMUL2 FFMA2",
    "integer multiply": "IMAD IMAD32I",
    "special": "MUFU I2F F2I F2F I2FP F2IP FLO POPC",
    "memory": "LDG LDGSTS LD STG ST LDS CREDUX STS ATOMS ATOMG ATOM RED REDG SHFL LDC LDL STL"
    " REDUX S2R",
    "control": "LDGDEPBAR DEPBAR BRA BSSY BSYNC BREAK WARPSYNC ENDCOLLECTIVE BAR EXIT CALL RET NOP"
    " YIELD",
}
PIPE_OF = {opcode: pipe for pipe, opcodes in PIPES.items() for opcode in opcodes.split()}

# --- the kernels ---

FP8 = [f"{kind}<{fmt}>" for kind in ("Float8Numerics", "MXNumerics") for fmt in ("E4M3", "E5M2")]
MXFP4 = ["MXNumerics<E2M1>"]
DELAYED = ["DelayedNumerics<E4M3>", "DelayedNumerics<E5M2>"]
NVFP4 = ["NVFP4Numerics", "FourOverSixNumerics"]
ENCODERS = ("NearestVec4<E2M1>", "StochasticVec4")
SHAPES = ("Tile", "Tile32x256")
INSTANCES = {
    "adamw": [""],
    "partial_amax": (*SHAPES, "Tile, true"),
    "partial_select": ("false", "true", "false, true"),
    "partial_select_flat": ("false", "true"),
    "select": ("false", "true"),
    "compute_scale": [*FP8, *MXFP4, *NVFP4],
    "compute_scale_delayed": ("false", "true"),
    "expand_scales": ("u8", "i32"),
    "partial_cast": [
        *(f"{kind}, NearestVec4<{kind[-5:-1]}>, {shape}" for kind in [*FP8, *MXFP4]
          for shape in SHAPES),
        *(f"{kind}, NearestVec4<{kind[-5:-1]}>, Tile" for kind in DELAYED),
        *(f"{kind}, {encoder}, {shape}" for kind in NVFP4 for encoder in ENCODERS
          for shape in SHAPES),
        *(f"NVFP4Numerics, {encoder}, Tile, true" for encoder in ENCODERS),
    ],
    "partial_amax_cast": [
        *(f"MXNumerics<{fmt}>, 32, {square}"
          for fmt in ("E4M3", "E5M2", "E2M1") for square in ("false", "true")),
        *(f"Float8Numerics<{fmt}>, 128, {square}"
          for fmt in ("E4M3", "E5M2") for square in ("false", "true")),
        "MXNumerics<E4M3>, 32, false, true",
    ],
    "transpose": ("4", "8"),
    "dequantize": [
        f"{kind}, {shape}" for kind in [*FP8, *DELAYED, *MXFP4, *NVFP4] for shape in SHAPES
    ],
    "fused_op": ("false", "true"),
    "copy_codes": ("false", "true"),
    "digest": [""],
    "write_words": [""],
    "probe_read": [""],
}  # fmt: skip
"""By file, the arguments of the templates that are asked for."""

KERNELS = [
    f"{name}<{template}>" if template else name
    for name, templates in INSTANCES.items()
    for template in templates
]

REPEATED = re.compile(
    r"E5M2|partial_select<false|partial_amax<Tile, true|Nearest.*true|32, false, true"
    r"|partial_cast<(MXNumerics<E4M3|FourOverSix|MXNumerics<E2M1.* Tile>|.*Stochastic.*Tile32x256)"
)  # fmt: skip
"""Kernels whose loops another one has, but for constants and for what a tile does outside of them:
E5M2 beside E4M3, MXFP8 and delayed scaling beside FP8, MXFP4 and 4-over-6's cast beside NVFP4's,
errors by magnitude beside squares, which take a multiplication more, and most variants on trial."""

RESIDENT = {
    "compute_scale<FourOverSix": (128, 7),
    "partial_amax_cast.*128, true": (512, 2), "partial_amax_cast": (128, 5),
    "partial_amax<Tile32x256": (128, 5), "partial_amax": (128, 6), "partial_select": (128, 6),
    "partial_cast.*Tile32x256": (128, 5), "partial_cast<Delayed": (128, 5),
    "partial_cast.*Stochastic": (128, 5), "partial_cast": (128, 6),
    "transpose": (256, 3), "fused_op<false": (128, 6), "copy_codes": (128, 6),
    "probe_read": (256, 4), "": (128, 8),
}  # fmt: skip
"""Threads of a block, and the blocks that a multiprocessor's registers must hold: of the first row
whose pattern is found."""


def threads_and_blocks(kernel: str) -> tuple[int, int]:
    """Of :data:`RESIDENT`."""
    return next(size for pattern, size in RESIDENT.items() if re.search(pattern, kernel))


# --- machine code ---


@dataclass(frozen=True)
class Instruction:
    """Of SASS: ``@P0 LDG.E.128 R4, desc[UR8][R2.64]``."""

    opcode: str
    operands: str

    @property
    def pipe(self) -> str:
        """Which one executes it; uniform ones are named by a U."""
        name = self.opcode.partition(".")[0]
        if (name not in PIPE_OF and name.startswith("U")) or name in ("R2UR", "S2UR", "LDCU"):
            return "uniform"
        return PIPE_OF[name]

    @property
    def width(self) -> int:
        """Bytes that a memory instruction moves for each lane."""
        found = re.search(r"\.(128|64|U8|S8|U16|S16)\b", self.opcode)
        return {"128": 16, "64": 8, "8": 1, "16": 2}[found[1].lstrip("US")] if found else 4

    def is_global(self, *kinds: str) -> bool:
        """Whether it accesses global memory, or what may be that; "LD" or "ST"."""
        name = self.opcode.partition(".")[0]
        return name in {f"{k}{g}" for k in kinds for g in ("", "G")} or (
            name == "LDGSTS" and "LD" in kinds
        )

    @property
    def registers(self) -> set[int]:
        """Those that a load fills."""
        first = int(self.operands.lstrip("R").partition(",")[0])
        return set(range(first, first + max(self.width // 4, 1)))

    def touches(self, registers: set[int]) -> bool:
        """Whether it names one of them, or the pair that one ends."""
        return any(int(n) in registers for n in re.findall(r"\bR(\d+)", self.operands))


LABEL = re.compile(r"(\.L_x_\d+):")
CODE = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z]\S*) *(.*?)\s*;")


def instructions_and_jumps(text: str) -> tuple[list[Instruction], list[tuple[int, int]]]:
    """What nvdisasm printed; backward jumps as (first, last) instruction of the loop."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(found)
        elif code := CODE.match(line):
            found.append(Instruction(code[1], code[2]))
    jumps = []
    for at, each in enumerate(found):
        target = re.search(r"`\((\.L_x_\d+)\)", each.operands)
        if each.opcode.startswith("BRA") and target and labels[target[1]] < at:
            jumps.append((labels[target[1]], at))
    return found, jumps


@dataclass(frozen=True)
class Loop:
    """A hot loop.

    Attributes:
        body: its instructions.
        copied: whether its masters were on their way to shared memory before it begins.
    """

    body: list[Instruction]
    copied: bool = False

    @property
    def loads(self) -> list[int]:
        """Where 16 bytes are asked for; where they are read, if they were copied."""

        def is_load(each: Instruction) -> bool:
            return each.opcode.startswith("LDS") if self.copied else each.is_global("LD")

        return [i for i, each in enumerate(self.body) if is_load(each) and each.width == 16]

    @property
    def rounds_later(self) -> int:
        """Rounds of the loop that go by before copies into shared memory are waited for."""
        waits = [each.operands for each in self.body if each.opcode == "DEPBAR.LE"]
        return max((int(each.rpartition(",")[2], 16) for each in waits), default=0)

    @property
    def most_in_flight(self) -> int:
        """Loads under way, at most."""
        return len(self.loads) * (1 + self.rounds_later)

    @property
    def narrow_loads(self) -> int:
        """Loads from global memory of fewer bytes."""
        return sum(each.is_global("LD") and each.width < 16 for each in self.body)

    @property
    def generic(self) -> int:
        """Accesses to addresses of which the compiler does not know that they are global: slower,
        and an atomic returns a value there.
        """
        return sum(each.opcode.partition(".")[0] in ("LD", "ST", "ATOM") for each in self.body)

    @property
    def rounding(self) -> str:
        """What elements are rounded to, as far as an instruction says it."""
        opcodes = " ".join(each.opcode for each in self.body)
        return "BF16" if "F2FP.BF16" in opcodes else "FP16" if "F2FP.F16" in opcodes else "-"

    @property
    def by_pipe(self) -> Counter[str]:
        """Instructions a quad."""
        counts = Counter(each.pipe for each in self.body)
        return Counter({pipe: n / len(self.loads) for pipe, n in counts.items()})

    @property
    def instructions(self) -> float:
        """A quad."""
        return len(self.body) / len(self.loads)

    @property
    def bytes(self) -> float:
        """Of global memory, for a quad and warp."""
        moved = sum(each.width for each in self.body if each.is_global("LD", "ST"))
        return 32 * (moved / len(self.loads) + 16 * self.copied)

    @property
    def mean_in_flight(self) -> float:
        """Loads under way, averaged over the instructions: each from where it is asked for until
        its registers are named, in the next round if not before; a copy until it is waited for.
        What was copied before the loop becomes less with every round.
        """
        if self.copied:
            return len(self.loads) * self.rounds_later / 2
        length, waits = len(self.body), 0
        for at in self.loads:
            load = self.body[at]
            rest = (*self.body[at + 1 :], *self.body[:at])
            if load.opcode.startswith("LDGSTS"):
                ends = (each.opcode == "DEPBAR.LE" for each in rest)
                waits += self.rounds_later * length
            else:
                ends = (each.touches(load.registers) for each in rest)
            waits += next((n for n, end in enumerate(ends) if end), length)
        return waits / length

    def clocks(self, chip: Chip) -> dict[str, float]:
        """For a quad and warp, by what it is the time of."""
        pipes = self.by_pipe
        wide = sum(each.width == 16 for each in self.body if each.pipe == "memory")
        pipes["memory"] += 3 * wide / len(self.loads)
        # The pipe that multiplies integers adds and multiplies floats, too.
        pipes["multiply-add"] += pipes["integer multiply"]
        clocks = {pipe: pipes[pipe] / rate for pipe, rate in RATES.items()}
        return {"DRAM": self.bytes / chip.bytes_per_clock, "issue": self.instructions / 4, **clocks}


@dataclass(frozen=True)
class Report:
    """One kernel for one architecture.

    Attributes:
        kernel: the expression that names it.
        arch: such as ``"sm_90"``.
        registers, spills: registers of a thread; bytes of stack and of spills.
        resident: thread blocks that a multiprocessor's registers hold.
        threads: of a block.
        loops: the hot ones.
        atomics: those of global memory that return a value.
    """

    kernel: str
    arch: str
    registers: int
    spills: int
    threads: int
    resident: int
    loops: list[Loop]
    atomics: int

    def kib_in_flight(self, loads: float) -> float:
        """Of a multiprocessor, with so many loads of a thread under way."""
        return loads * 16 * self.threads * self.resident / 1024


def nvdisasm() -> str | None:
    """The disassembler: of a toolkit, or of the package nvidia-cuda-nvdisasm."""
    packages = Path(sysconfig.get_path("purelib")).parent.glob("*/nvidia/cu*/bin/nvdisasm")
    return shutil.which("nvdisasm") or next(map(str, packages), None)


def disassembled(cubin: bytes) -> str:
    """SASS."""
    program = nvdisasm()
    assert program is not None, "nvdisasm is needed: pip install nvidia-cuda-nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [program, "-c", file.name], capture_output=True, text=True, check=True
        )
    return done.stdout


USAGE = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers", re.DOTALL,
)  # fmt: skip


def report_of(kernel: str, arch: str, cubin: bytes | None, log: str) -> Report:
    """Of a kernel that was compiled with ``--ptxas-options=-v``; no loop without a cubin."""
    stack, stores, loads, registers = map(int, USAGE.findall(log)[0])
    found, jumps = instructions_and_jumps("" if cubin is None else disassembled(cubin))
    innermost = [
        (first, last) for first, last in jumps if not any(first <= a and b < last for a, b in jumps)
    ]
    loops = [Loop(found[first : last + 1]) for first, last in innermost]
    for first, last in set(jumps) - set(innermost):
        inside = [range(a, b + 1) for a, b in jumps if first <= a and b < last]
        body = [
            found[i] for i in range(first, last + 1) if not any(i in within for within in inside)
        ]
        loop = Loop(body, copied=True)
        copies = any(each.opcode.startswith("LDGSTS") for each in found[first : last + 1])
        if loop.rounds_later and not copies:
            loops.append(loop)
    threads, _ = threads_and_blocks(kernel)
    allocated = -(-registers // 8) * 8 * threads  # registers are given out by eights
    resident = min(65536 // allocated, 2048 // threads)
    return Report(
        kernel, arch, registers, stack + stores + loads, threads, resident,
        [loop for loop in loops if loop.loads],
        sum(bool(re.match(r"ATOMG?\b", each.opcode)) for each in found),
    )  # fmt: skip


def compiled_report(kernel: str, arch: str) -> Report:
    """Compile it, too."""
    text = (cuda_sources() / "cuda" / f"{kernel.partition('<')[0]}.cu").read_text()
    _, cubin, log = compile_text(text, kernel, arch, cuda_sources(), ("--ptxas-options=-v",))
    return report_of(kernel, arch, cubin, log)


# --- bars ---

AMAX, CAST, SELECT = "partial_amax<", "partial_cast", "partial_select<"
ONE_PASS = "partial_amax_cast"
MEMORY_BOUND = rf"{AMAX}|{CAST}<(Float8|MX|Delayed)Numerics<E[45]M"
HEADROOM = 0.9
"""The busiest pipe could take so much more time before memory is no longer what a kernel waits
for."""

ONE_PASS_HEADROOM = rf"{ONE_PASS}<\w+<E[45]M"
"""On an H200; else one pass waits for memory, with less room or none. Its warps wait for all of
their loads at once, so that those are under way most of the time."""

NVFP4_CAST = rf"{CAST}<NVFP4Numerics, NearestVec4"
NVFP4_INTEGER, NVFP4_INTEGER_TIME = 36, 0.60
"""Integer instructions a quad, and their time as a share of memory's, on an H200."""

STOCHASTIC_CAST = rf"{CAST}<NVFP4Numerics, Stochastic"
"""On an H200 no pipe takes longer than memory; on a B200 the integer pipe does."""

SELECT_INSTRUCTIONS = 115
"""A quad, of a choice and the cast under it; of a kernel that only chose they were 100, and of a
cast they are 51."""


def has_bars(kernel: str, arch: str) -> bool:
    """Whether its hot loops have bars to meet."""
    with_bars = f"{MEMORY_BOUND}|{NVFP4_CAST}|{STOCHASTIC_CAST}|{SELECT}|{ONE_PASS}"
    return arch in CHIPS and bool(re.match(with_bars, kernel))


def missed(report: Report, *, loops: bool = True) -> list[str]:
    """The bars that a kernel misses, in words; of its hot loops, too."""
    kernel = report.kernel
    wrong = [f"{report.spills} bytes on the stack"] if report.spills else []
    _, blocks = threads_and_blocks(kernel)
    if report.resident < blocks:
        wrong.append(f"{report.resident} resident blocks of {blocks}")
    if not loops or not has_bars(kernel, report.arch):
        return wrong
    gpu = CHIPS[report.arch]
    if not report.loops:
        wrong.append("no hot loop is found")
    if report.atomics:
        wrong.append(f"{report.atomics} atomics that return a value")
    for loop in report.loops:
        clocks = loop.clocks(gpu)
        memory = clocks.pop("DRAM")
        busiest = max(clocks, key=clocks.__getitem__)
        if loop.narrow_loads:
            wrong.append(f"{loop.narrow_loads} narrow loads in a hot loop")
        if loop.generic:
            wrong.append(f"{loop.generic} generic addresses in a hot loop")
        one_pass = kernel.startswith(ONE_PASS)
        room = re.match(MEMORY_BOUND, kernel) or (
            re.match(ONE_PASS_HEADROOM, kernel) and report.arch == "sm_90"
        )
        stochastic = re.match(STOCHASTIC_CAST, kernel)
        waits = room or one_pass or (stochastic and report.arch == "sm_90")
        if waits and clocks[busiest] * (1 + HEADROOM * bool(room)) > memory:
            wrong.append(f"{busiest} takes {clocks[busiest]:.1f} clocks of memory's {memory:.1f}")
        if re.match(NVFP4_CAST, kernel) and report.arch == "sm_90":
            count, share = loop.by_pipe["integer"], clocks["integer"] / memory
            if count > NVFP4_INTEGER or share > NVFP4_INTEGER_TIME:
                wrong.append(f"{count:.1f} integer instructions, {share:.0%} of memory's time")
        if kernel.startswith(SELECT) and loop.instructions > SELECT_INSTRUCTIONS:
            wrong.append(f"{loop.instructions:.1f} instructions")
        # Weights are BF16; what is cast unrounded has no bar here, nor has what is busy itself.
        bf16 = (loop.rounding == "BF16" and not stochastic) or kernel.startswith(AMAX)
        kib = report.kib_in_flight(loop.most_in_flight if one_pass else loop.mean_in_flight)
        if bf16 and kib < gpu.in_flight:
            wrong.append(f"{kib:.0f} KiB in flight of {gpu.in_flight:.0f}")
    return wrong


# --- the table ---

HEADER = (
    "kernel", "arch", "regs", "blocks", "round", "instr", "integer", "mul-add", "int mul",
    "special", "memory", "control", "KiB most / mean", "clocks: DRAM", "busiest", "bars",
)  # fmt: skip


def rows_of(report: Report) -> list[list[str]]:
    """One for each hot loop; one without figures of a loop where there is none."""
    common = [report.kernel, report.arch, str(report.registers), str(report.resident)]
    verdict = "; ".join(missed(report)) or "met"
    rows = []
    for loop in report.loops:
        pipes, clocks = loop.by_pipe, loop.clocks(CHIPS[report.arch])
        memory = clocks.pop("DRAM")
        busiest = max(clocks, key=clocks.__getitem__)
        rows.append([
            *common, loop.rounding, f"{loop.instructions:.1f}",
            *(f"{pipes[pipe]:.1f}" for pipe in (*RATES, "control")),
            f"{report.kib_in_flight(loop.most_in_flight):.0f} / "
            f"{report.kib_in_flight(loop.mean_in_flight):.0f}",
            f"{memory:.1f}", f"{busiest} {clocks[busiest]:.1f}", verdict,
        ])  # fmt: skip
    return rows or [[*common, *["-"] * (len(HEADER) - len(common) - 1), verdict]]


def main() -> int:
    """Print the table; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", nargs="+", default=list(CHIPS), choices=list(CHIPS))
    parser.add_argument("pattern", nargs="?", default="", help="of kernels' names, a regex")
    options = parser.parse_args()
    for name, each in CHIPS.items():
        print(f"{each.name} ({name}): {each.bytes_per_clock:.1f} B a clock and multiprocessor, "
              f"{each.in_flight:.0f} KiB in flight")  # fmt: skip
    print("", f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER), sep="\n", flush=True)
    wrong = 0
    for kernel in KERNELS:
        if not re.search(options.pattern, kernel):
            continue
        for arch in options.arch:
            report = compiled_report(kernel, arch)
            wrong += bool(missed(report))
            for row in rows_of(report):
                print(f"| {' | '.join(row)} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
