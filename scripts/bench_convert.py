"""Times ``python -m zerocast convert`` against the disk, which it reads and writes.

A Llama of the widths of 8B, of as many layers as asked for, with random BF16 values, is made in a
directory. Then, in turn, each time with the page cache dropped: the conversion, by its command,
with its start; and ``cat`` of the source and ``dd`` with fsync of the target's bytes.

    python scripts/bench_convert.py DIRECTORY [--layers 12] [--repeats 3]
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

DIALECTS = ("modelopt/nvfp4", "compressed-tensors/fp8-block", "modelopt/mxfp8")
WIDTHS = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
VOCABULARY = 128256


def make(folder: Path, layers: int) -> None:
    """Write the source: a file for each layer, and one for the vocabulary."""
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randn(256, 14336, generator=draw).mul_(0.02).bfloat16()
    files: dict[str, dict[str, torch.Tensor]] = {}

    def add(file: str, name: str, shape: tuple[int, ...]) -> None:
        files.setdefault(file, {})[name] = drawn.repeat(-(-shape[0] // 256), 1)[
            : shape[0], : shape[1]
        ].clone()

    places = {}
    for i in range(layers + 1):
        file = f"model-{i:05}.safetensors"
        if i < layers:
            for name, shape in WIDTHS.items():
                add(file, f"model.layers.{i}.{name}.weight", shape)
        else:
            add(file, "model.embed_tokens.weight", (VOCABULARY, 4096))
            add(file, "lm_head.weight", (VOCABULARY, 4096))
        held = files.pop(file)
        places |= dict.fromkeys(held, file)
        save_file(held, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))


def cold(folder: Path) -> None:
    """Write what the system has not written yet, and drop the folder's pages from its cache."""
    os.sync()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(command: str) -> float:
    """Run a shell command and return how long it took."""
    began = time.perf_counter()
    subprocess.run(command, shell=True, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    """Print a line of JSON for each dialect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    source, target = given.directory / "source", given.directory / "target"
    if not source.exists():
        make(source, given.layers)
    num_bytes = sum(file.stat().st_size for file in source.iterdir())
    for dialect in DIALECTS:
        times: dict[str, list[float]] = {"cat": [], "dd": [], "convert": []}
        for _ in range(given.repeats):
            shutil.rmtree(target, ignore_errors=True)
            cold(source)
            command = f"{sys.executable} -m zerocast convert {source} {target} --to {dialect}"
            times["convert"].append(seconds(command))
            written = sum(file.stat().st_size for file in target.iterdir())
            shutil.rmtree(target)
            cold(source)
            times["cat"].append(seconds(f"cat {source}/*.safetensors >/dev/null"))
            blocks = f"bs=4M count={-(-written // (4 << 20))}"
            times["dd"].append(seconds(f"dd if=/dev/zero of={target} {blocks} conv=fsync"))
            target.unlink()
        medians = {name: statistics.median(each) for name, each in times.items()}
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        print(
            json.dumps(
                {
                    "dialect": dialect,
                    "GB read": round(num_bytes / 1e9, 2),
                    "GB written": round(written / 1e9, 2),
                    **{name: [round(t, 2) for t in sorted(each)] for name, each in times.items()},
                    "convert / (cat + dd)": round(
                        medians["convert"] / (medians["cat"] + medians["dd"]), 2
                    ),
                    "peak GiB": round(peak, 2),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
