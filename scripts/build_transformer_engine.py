"""A library of TransformerEngine's kernels for one architecture, out of a checkout of it.

For scripts/bench_transformer_engine.py. The checkout lies elsewhere: nothing of it is in this
repository, and nothing is written into it. What the casts of master weights call is about a dozen
of its files, which nvcc compiles in a minute where the whole takes an hour; together with
bench_transformer_engine.cpp they become one shared library under ``build/``, kept until sources or
flags change. Where the checkout or the package holds a library that is built already, only the
driver is compiled, and linked to that one.

Written against version 2.20. It needs nvcc, and of torch's own dependencies the headers of cuDNN,
NCCL, NVRTC and cuBLAS.

    python scripts/build_transformer_engine.py CHECKOUT [--capability 9.0]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

DRIVER = Path(__file__).with_name("bench_transformer_engine.cpp")
BUILD = Path(__file__).parents[1] / "build" / "transformer_engine"

COMMON = Path("transformer_engine/common")
SOURCES = (
    "transformer_engine.cpp",
    "common.cu",
    "util/cuda_driver.cpp",
    "util/cuda_runtime.cpp",
    "util/multi_stream.cpp",
    "util/rtc.cpp",
    "recipe/current_scaling.cu",
    "recipe/fp8_block_scaling.cu",
    "recipe/nvfp4.cu",
    "multi_tensor/compute_scale.cu",
    "transpose/transpose.cu",
    "cast/cast.cu",
)
WEAK = "cast/cast.cu"
"""It dispatches to kernels that are never called here and take minutes to compile: references that
may stay empty leave them out."""
FAST_MATH = ("multi_tensor/compute_scale.cu",)
"""What the checkout's own build compiles with ``--use_fast_math``."""
EMBEDDED = ("transpose/rtc/transpose.cu", "utils.cuh", "util/math.h")
"""Files that others include as strings, because NVRTC compiles them when they are used."""

LIBRARIES = ("nvrtc", "nvrtc-builtins", "cublasLt")
"""What it links; the second because NVRTC opens it by a name that is found once it is loaded."""

FLAGS = (
    "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC",
    "-DNVTE_BUILD_NUM_PHILOX_ROUNDS=10",
)  # fmt: skip


class BuildError(Exception):
    """Why there is no library; one line."""


def run(command: Sequence[object]) -> str:
    """What ``command`` printed; :class:`BuildError` with its first error where it failed."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise BuildError(f"{words[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        lines = done.stdout.strip().splitlines() or [f"exit status {done.returncode}"]
        errors = [line for line in lines if "error" in line or "undefined" in line]
        raise BuildError(f"{Path(words[0]).name}: {(errors or lines[-1:])[0].strip()}")
    return done.stdout


def version(checkout: Path) -> str:
    """What the checkout says that it is."""
    file = checkout / "build_tools" / "VERSION.txt"
    return file.read_text().strip() if file.is_file() else "of unknown version"


def toolkit() -> Path:
    """Where nvcc's own headers and libraries are."""
    found = re.search(r"TOP=(.*)", run(["nvcc", "--dryrun", "-x", "cu", "-c", os.devnull]))
    if found is None:
        raise BuildError("nvcc does not say where its toolkit is")
    return Path(found[1]).resolve()


def packages(pattern: str) -> list[Path]:
    """What matches in the ``nvidia`` packages that torch was installed with."""
    spec = find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return sorted(path for place in places for path in Path(place).glob(pattern))


def find(name: str, cuda: Path) -> Path:
    """A library of the packages, which torch has loaded already, or else of the toolkit."""
    found = [*packages(f"*/lib/{name}*"), *cuda.glob(f"lib64/{name}"), *cuda.glob(f"lib/{name}")]
    if not found:
        raise BuildError(f"no {name}, neither in nvcc's toolkit nor among torch's packages")
    return found[0]


def built(checkout: Path) -> Path | None:
    """A library that the checkout or the installed package holds already."""
    places = (checkout, checkout / "transformer_engine", checkout / "transformer_engine/wheel_lib")
    return next((p for at in places for p in sorted(at.glob("libtransformer_engine*.so"))), None)


def key(checkout: Path, flags: Sequence[object]) -> str:
    """Changes with whatever the library is made of."""
    digest = hashlib.sha256(repr([str(flag) for flag in flags]).encode())
    digest.update(DRIVER.read_bytes() + Path(__file__).read_bytes())
    for path in sorted((checkout / COMMON).rglob("*")):
        if path.suffix in (".cu", ".cuh", ".cpp", ".h", ".hpp"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def embed(text: str, name: str) -> str:
    """A C++ header that holds ``text`` as the string ``name``."""
    return f'static constexpr char {name}[] = R"embedded({text})embedded";\n'


def architecture(capability: tuple[int, int]) -> str:
    """As nvcc names it. From 10.0 on there are instructions that only a device's own target has."""
    major, minor = capability
    return f"{major}{minor}" + ("a" if major >= 10 else "")


def write_strings(common: Path, cuda: Path, folder: Path) -> None:
    """The headers that the checkout's own build would make of some of its files."""
    strings = {"path_cuda_include": str(cuda / "include")}
    for name in EMBEDDED:
        strings["code_" + re.sub(r"\W", "_", name)] = (common / name).read_text()
    for name, text in strings.items():
        (folder / f"string_{name}.h").write_text(embed(text, f"string_{name}"))


def compile_all(
    common: Path, names: Sequence[str], flags: Sequence[str], folder: Path
) -> list[Path]:
    """Object files of our driver and of the checkout's ``names``, on every core."""

    def compile_one(name: str) -> Path:
        source = DRIVER if name == DRIVER.name else common / name
        target = folder / f"{re.sub(r'[^a-z0-9]', '_', name)}.o"
        fast = ["--use_fast_math"] if name in FAST_MATH else []
        run(["nvcc", *flags, *fast, f"-I{folder}", "-c", source, "-o", target])
        if name == WEAK:
            run(["objcopy", "--weaken", target])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, [DRIVER.name, *names]))


def link(objects: Sequence[Path], libraries: Sequence[Path], target: Path) -> None:
    """One shared library that finds the others where they are now."""
    places = ":".join(dict.fromkeys(str(path.resolve().parent) for path in libraries))
    options = ["-shared", "-Wl,--no-as-needed,--no-undefined", f"-Wl,-rpath,{places}"]
    run(["g++", *options, "-o", target, *objects, *libraries])


def library(checkout: Path, arch: str, folder: Path = BUILD) -> Path:
    """The shared library of the checkout's kernels and our driver, for ``sm_<arch>``.

    Raises:
        BuildError: something is missing, or does not compile.
    """
    common = checkout / COMMON
    ready = built(checkout)
    names = () if ready else SOURCES
    for name in ("include/transformer_engine/transformer_engine.h", *names):
        if not (common / name).is_file():
            raise BuildError(f"no {COMMON / name}: is it a checkout, of about version 2.20?")
    cuda = toolkit()
    needed = [ready] if ready else [find(f"lib{name}.so", cuda) for name in LIBRARIES]
    libraries = [find("libcudart.so", cuda), *needed]
    # nvcc's own headers first: those of the packages may be of another release.
    own = [cuda / "include", cuda / "include/cccl"]
    places = [common / "include", checkout / "transformer_engine", *own, *packages("*/include")]
    gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    flags = [*FLAGS, gencode, *(f"-I{place}" for place in places)]
    target = folder / f"{key(checkout, [*flags, *libraries])}.so"
    if not target.is_file():
        work = target.with_suffix(f".{os.getpid()}")
        work.mkdir(parents=True)
        try:
            if not ready:
                write_strings(common, cuda, work)
            link(compile_all(common, names, flags, work), libraries, work / target.name)
            (work / target.name).replace(target)
        finally:
            shutil.rmtree(work)
    return target


def main(arguments: Sequence[str]) -> int:
    """Build, and say of what."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--capability", default="9.0", help="of the device, as in 9.0")
    options = parser.parse_args(arguments)
    major, minor = map(int, options.capability.split("."))
    arch = architecture((major, minor))
    try:
        path = library(options.checkout.resolve(), arch)
        print(f"TransformerEngine {version(options.checkout)} for sm_{arch}: {path.name}")
    except BuildError as error:
        print(f"TransformerEngine {version(options.checkout)}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
