"""Train the byte-level GPT under torch's FSDP2, whose all-gathers move codes instead of BF16.

    torchrun --nproc-per-node 4 examples/fsdp2.py --recipe nvfp4
    mpirun -n 4 python -m mpi4py examples/fsdp2.py --recipe block --autocast
    python examples/fsdp2.py --recipe bf16                      # one rank, nothing quantized

Three lines differ from a script without zerocast: the conversion, ``precompute_scales_for_fsdp``
after the step, and with ``--autocast`` the region around the forward. It ends with what an
all-gather of all weights moves, and compares every gathered byte on every rank with the unsharded
cast of the whole masters by the reference backend; the exit code is 1 where one differs.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from gpt.check import first_difference, unsharded_cast
from gpt.data import load_corpus, sample
from gpt.launch import fast_dtype, launched_process_group
from gpt.model import GPT
from gpt.training import RECIPES
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerocast
from zerocast.comm import Communicator


def options(description: str, recipes: list[str]) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--recipe", choices=recipes, default="nvfp4", help="what is gathered")
    parser.add_argument(
        "--autocast", action="store_true", help="quantize activations and gradients, too"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over all replicas")
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser


def sharded_model(recipe: zerocast.Recipe | None, dtype: torch.dtype) -> GPT:
    """The same on any number of ranks: FP32 masters, sharded, gathered in codes of ``recipe`` or,
    where it is None, in ``dtype``.
    """
    torch.manual_seed(0)
    model = GPT()
    if recipe is not None:
        zerocast.nn.convert(model, recipe, weights="master", filter_fqns=["head"])
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def region(arguments: argparse.Namespace, comm: Communicator) -> AbstractContextManager[Any]:
    """Where forwards run."""
    recipe = RECIPES[arguments.recipe]
    if recipe is None or not arguments.autocast:
        return nullcontext()
    return zerocast.autocast(recipe=recipe, amax_reduction_group=comm)


def train(
    model: GPT, arguments: argparse.Namespace, comm: Communicator, *, replica: int, replicas: int
) -> None:
    """Steps of torch's AdamW on the sharded masters; the loss every now and then. Each of the
    ``replicas`` of the model reads another text.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    draw = torch.Generator().manual_seed(replica)
    corpus = load_corpus()
    for step in range(arguments.steps):
        text = sample(corpus.training, arguments.batch // replicas, GPT.context, draw)
        with region(arguments, comm):
            loss = model(*text)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if RECIPES[arguments.recipe] is not None:
            zerocast.sharded.precompute_scales_for_fsdp(model)
        if step % 20 == 0 or step == arguments.steps - 1:
            mean = loss.detach().reshape(1).float()
            comm.all_reduce_sum_(mean)
            if comm.rank == 0:
                print(f"step {step}: loss {mean.item() / comm.size:.3f} nats a byte", flush=True)


def gather(model: GPT) -> dict[str, zerocast.QuantizedTensor]:
    """Gather all weights; return the unsharded casts of those that are gathered in codes.
    Collective.
    """
    # Reshards the parameters, and casts those of a skipped step.
    zerocast.sharded.precompute_scales_for_fsdp(model)
    expected = {}
    for name, parameter in model.named_parameters():
        shard = parameter.to_local()
        if isinstance(shard, zerocast.sharded.MasterWeight):
            codes = shard.low_bit_all_gather.shards.storage
            expected[name] = unsharded_cast(parameter.full_tensor(), codes)
    for module in (*model.blocks, model):
        module.unshard()
    return expected


def wrong_byte(model: GPT) -> tuple[int, str | None]:
    """How many bytes of gathered weights were compared with the unsharded cast, and the first that
    differs. Collective.
    """
    compared, difference = 0, None
    expected = gather(model)
    weights = dict(model.named_parameters())
    for name, whole in expected.items():
        buffers = whole.quantized_storage.buffers
        for buffer, stored in weights[name].quantized_storage.buffers.items():
            compared += stored.nbytes
            difference = difference or first_difference(f"{name}.{buffer}", stored, buffers[buffer])
    return compared, difference


def say_verdict(comm: Communicator, compared: int, difference: str | None) -> int:
    """Say whether every rank compared its weights and found no ``difference``; the exit code."""
    wrong = next(filter(None, comm.all_gather_object(difference)), None)
    if comm.rank == 0:
        print(
            f"The gathered weights equal the unsharded cast on every rank: {compared:,} bytes "
            f"compared on each of {comm.size}."
            if wrong is None
            else f"WRONG: {wrong}",
            flush=True,
        )
    return int(wrong is not None)


def run(arguments: argparse.Namespace, comm: Communicator) -> int:
    """Train, say what travels, compare; 0, or 1 where a byte is wrong."""
    recipe = RECIPES[arguments.recipe]
    model = sharded_model(recipe, fast_dtype(comm))
    report = zerocast.sharded.report(model)
    if comm.rank == 0:
        print(report, flush=True)
    train(model, arguments, comm, replica=comm.rank, replicas=comm.size)
    bf16 = 2 * sum(parameter.shape.numel() for parameter in report.parameters)
    if comm.rank == 0:
        print(
            f"an all-gather of all weights moves {report.gathered_bytes / 1e3:,.1f} kB; in BF16 it "
            f"would be {bf16 / 1e3:,.1f} kB",
            flush=True,
        )
    return 0 if recipe is None else say_verdict(comm, *wrong_byte(model))


def main() -> int:
    """The exit code of :func:`run` on the ranks of this job."""
    arguments = options(__doc__, list(RECIPES)).parse_args()
    with launched_process_group() as comm:
        if arguments.batch % comm.size:
            raise SystemExit(f"--batch {arguments.batch} must divide over {comm.size} ranks")
        return run(arguments, comm)


if __name__ == "__main__":
    sys.exit(main())
