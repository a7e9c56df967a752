"""Train a byte-level GPT on sharded FP32 masters with BF16 weights or those of any recipe.

    mpirun -n 4 python -m mpi4py examples/train_gpt.py --recipe nvfp4
    mpirun -n 4 python -m mpi4py examples/train_gpt.py --recipe mxfp8 --autocast
    torchrun --nproc-per-node 4 examples/train_gpt.py --compare bf16,current,nvfp4 --check
    python examples/train_gpt.py --recipe delayed                       # one rank

Every rank holds the whole model and its part of the masters. A step is an ordinary PyTorch step:
``loss.backward()``, ``optimizer.step()``; what happens in it is in :mod:`gpt.training` and in
:class:`zerocast.optim.ZeroOptimizer`. With ``--autocast`` the layers quantize activations and
gradients by the same recipe; with ``--overlap`` they wait for their codes one by one, and a step
does not; with ``--verify hash`` ranks compare their bytes after every step. With ``--checkpoint``
it saves beside the training, and the same command continues after a kill, on any number of ranks.
It ends with a table, and leaves a JSON record and a picture of losses and bytes in ``--out``. With
``--check`` every byte of every weight is compared with the unsharded cast on every rank, and the
exit code is 1 where one differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpt.data import load_corpus
from gpt.launch import fast_dtype, launched_ranks
from gpt.report import draw, print_table, title, write_record
from gpt.training import RECIPES, Settings, train


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=RECIPES, default="nvfp4", help="how weights are stored")
    parser.add_argument(
        "--compare", type=recipes, metavar="A,B,...", help="several recipes, as bf16,current,nvfp4"
    )
    parser.add_argument(
        "--autocast", action="store_true", help="quantize activations and gradients, too"
    )
    parser.add_argument(
        "--overlap", action="store_true", help="gather codes while the next forward runs"
    )
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", help="save there, and continue from what is there"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over all ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--verify", choices=("off", "hash", "full"), default="off",
        help="compare what ranks hold after each step",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="compare the weights byte for byte")
    parser.add_argument("--out", type=Path, default=Path("runs/train_gpt"), help="a folder")
    return parser.parse_args()


def recipes(text: str) -> list[str]:
    """``bf16,current`` -> the two names."""
    names = text.split(",")
    for name in names:
        if name not in RECIPES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(RECIPES)}")
    return names


def main() -> int:
    """Run what was asked for; 0, or 1 where a check found wrong weights."""
    arguments = parse_arguments()
    with launched_ranks() as comm:
        if arguments.batch % comm.size:
            raise SystemExit(f"--batch {arguments.batch} must divide over {comm.size} ranks")
        settings = Settings(
            steps=arguments.steps,
            seed=arguments.seed,
            batch=arguments.batch,
            lr=arguments.lr,
            dtype=fast_dtype(comm),
            autocast=arguments.autocast,
            overlap=arguments.overlap,
            verify=arguments.verify,
            checkpoint=arguments.checkpoint,
            check=arguments.check,
        )
        corpus = load_corpus()
        if comm.rank == 0:
            print(f"{comm.size} ranks; {corpus}", flush=True)
        names = arguments.compare or [arguments.recipe]
        runs = [train(name, settings, corpus, comm) for name in names]
        if comm.rank == 0:
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_record(arguments.out / "record.json", runs, settings, comm.size)
            draw(arguments.out / "comparison.png", runs, title(settings, comm.size))
            print_table(runs, settings, comm.size)
            print(f"Record and picture: {arguments.out}")
            for run in runs:
                if run.verdict is not None:
                    print(f"{run.recipe}: {run.verdict[1]}", flush=True)
        return int(any(run.verdict is not None and not run.verdict[0] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
