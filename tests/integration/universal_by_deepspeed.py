"""Continues a training by DeepSpeed on another number of gloo's ranks, by a universal checkpoint.

    universal_by_deepspeed.py DIRECTORY STAGE RECIPE...

Saves and converts where there is nothing yet; where there is, loads, and prints for each recipe how
many values of masters, and bytes of weights, are not those that were saved.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from train_by_deepspeed import (
    differing_bytes,
    make_engine,
    masters_of,
    one_step,
    weights_of,
    wrong_bytes,
)

import zerocast.adapters.deepspeed


def save(recipe: str, stage: int, folder: Path) -> None:
    """Save after three steps, and make a universal checkpoint of it."""
    engine = make_engine(recipe, stage, set())
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        one_step(engine, torch.randn(8, 96, generator=random))
    engine.save_checkpoint(str(folder), tag="third")
    dist.barrier()
    if dist.get_rank() == 0:
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=str(folder / "third"), output_folder=str(folder / "universal"),
                num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
                inject_missing_state=True,
            )
        )  # fmt: skip
        (folder / "latest_universal").write_text("universal")
    dist.barrier()


def wrong_after_load(recipe: str, stage: int, folder: Path) -> int:
    """Load on these ranks; return what differs, after loading and after one more step."""
    engine = make_engine(recipe, stage, set(), checkpoint={"load_universal": True})
    engine.load_checkpoint(str(folder))
    saved = torch.load(folder / "third" / "mp_rank_00_model_states.pt", weights_only=False)
    wrong, masters = 0, masters_of(engine)
    for name, master in get_fp32_state_dict_from_zero_checkpoint(str(folder), "third").items():
        wrong += int((masters[name] != master).sum())
    for name, weight in weights_of(engine).items():
        wrong += differing_bytes(saved["module"][name], weight)
    whole = {name: weight.detach().clone() for name, weight in weights_of(engine).items()}
    one_step(engine, torch.ones(8, 96) * dist.get_rank())
    return wrong + wrong_bytes(engine, whole)


def main() -> None:
    """Save or load on one rank."""
    directory, stage, recipes = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    dist.init_process_group("gloo")
    zerocast.adapters.deepspeed.install()
    is_saved = directory.joinpath(recipes[0], "latest_universal").exists()
    dist.barrier()
    for recipe in recipes:
        if not is_saved:
            save(recipe, stage, directory / recipe)
            continue
        wrong = torch.tensor(wrong_after_load(recipe, stage, directory / recipe))
        dist.all_reduce(wrong)
        if dist.get_rank() == 0:
            print(f"{recipe}: {wrong} wrong")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
