"""CUDA's conversions run on the host, and the record of what they gave.

``python -m tests.oracles.cuda_conversions`` writes the record, ``cuda_conversions.txt``, anew. It
needs a C++ compiler and CUDA's headers: a CUDA toolkit, or the packages nvidia-cuda-runtime,
nvidia-cuda-crt and nvidia-cuda-cccl.
"""

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

from tests.support.values import every_bf16

HERE = Path(__file__).parent
RECORD = HERE / "cuda_conversions.txt"
COMPILER = os.environ.get("CXX", "g++")
NAMES = ("e2m1", "e4m3", "e5m2", "e8m0")


def find_headers() -> Path | None:
    """The include folder of a CUDA toolkit or of the pip packages; None where neither is there."""
    nvcc = shutil.which("nvcc")
    candidates = [
        *(Path(os.environ[v]) / "include" for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ),
        *([Path(nvcc).resolve().parent.parent / "include"] if nvcc else []),
        Path("/usr/local/cuda/include"),
        *Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/include"),
    ]
    # cuda_fp16.h, which the others include, needs nv/target: it lies apart since CUDA 13.
    return next(
        (
            path
            for path in candidates
            if (path / "cuda_fp4.h").exists()
            and any((path / cccl / "nv/target").exists() for cccl in ("", "cccl"))
        ),
        None,
    )


def convert(x: torch.Tensor, headers: Path) -> dict[str, torch.Tensor]:
    """[n] FP32 -> by format name, [n] uint8 codes, by a program compiled against ``headers``."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "convert"
        command = [COMPILER, "-O1", "-w", f"-I{headers}", f"-I{headers}/cccl"]
        subprocess.run([*command, HERE / "cuda_conversions.cpp", "-o", program], check=True)
        output = subprocess.run(
            [program], input=x.numpy().tobytes(), capture_output=True, check=True
        )
    codes = torch.frombuffer(bytearray(output.stdout), dtype=torch.uint8).view(-1, len(NAMES))
    return {name: codes[:, i].contiguous() for i, name in enumerate(NAMES)}


def read_record() -> dict[str, torch.Tensor]:
    """By format name, [65536] uint8: the code of each BF16 value; E8M0 of the non-negative ones."""
    record = {}
    for line in RECORD.read_text().splitlines():
        if line and not line.startswith("#"):
            name, *runs = line.split()
            starts = [int(run.split(":")[0], 16) for run in runs]
            codes = [int(run.split(":")[1], 16) for run in runs]
            ends = [*starts[1:], 1 << 15 if name == "e8m0" else 1 << 16]
            lengths = [end - start for start, end in zip(starts, ends, strict=True)]
            record[name] = torch.tensor(codes, dtype=torch.uint8).repeat_interleave(
                torch.tensor(lengths)
            )
    return record


def write_record(headers: Path) -> None:
    """Write ``cuda_conversions.txt`` from what ``headers`` compute."""
    version = re.search(r"CUDART_VERSION\s+(\d+)", (headers / "cuda_runtime_api.h").read_text())
    assert version is not None
    lines = [
        "# Every BF16 value converted by the host code of CUDA's cuda_fp4.h and cuda_fp8.h,",
        f"# CUDART_VERSION {version[1]}. A run a:b says: from BF16 bits a on, the code is b (hex).",
    ]
    for name, codes in convert(every_bf16(), headers).items():
        codes = codes[: 1 << 15] if name == "e8m0" else codes
        starts = [0, *((codes[1:] != codes[:-1]).nonzero().flatten() + 1).tolist()]
        lines.append(" ".join([name, *(f"{s:04x}:{codes[s]:02x}" for s in starts)]))
    RECORD.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    found = find_headers()
    assert found is not None, "CUDA's headers were not found"
    write_record(found)
