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
from contextlib import nullcontext

import torch
from gpt.check import first_difference, unsharded_cast
from gpt.data import load_corpus, sample
from gpt.launch import fast_dtype, launched_process_group
from gpt.model import GPT
from gpt.training import RECIPES
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerocast
from zerocast.comm import Communicator


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=RECIPES, default="nvfp4", help="what is gathered")
    parser.add_argument(
        "--autocast", action="store_true", help="quantize activations and gradients, too"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over all ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


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


def train(model: GPT, arguments: argparse.Namespace, comm: Communicator) -> None:
    """Steps of torch's AdamW on the sharded masters; the loss every now and then."""
    recipe = RECIPES[arguments.recipe]
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    draw = torch.Generator().manual_seed(comm.rank)
    corpus = load_corpus()
    for step in range(arguments.steps):
        text = sample(corpus.training, arguments.batch // comm.size, GPT.context, draw)
        quantizes = recipe is not None and arguments.autocast
        group = {"amax_reduction_group": comm}
        with zerocast.autocast(recipe=recipe, **group) if quantizes else nullcontext():
            loss = model(*text)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if recipe is not None:
            zerocast.sharded.precompute_scales_for_fsdp(model)
        if step % 20 == 0 or step == arguments.steps - 1:
            mean = loss.detach().reshape(1)
            comm.all_reduce_sum_(mean)
            if comm.rank == 0:
                print(f"step {step}: loss {mean.item() / comm.size:.3f} nats a byte", flush=True)


def wrong_byte(model: GPT) -> tuple[int, str | None]:
    """How many bytes of gathered weights were compared with the unsharded cast, and the first that
    differs. Collective.
    """
    # Reshards the parameters, and casts those of a skipped step.
    zerocast.sharded.precompute_scales_for_fsdp(model)
    expected = {}
    for name, parameter in model.named_parameters():
        shard = parameter.to_local()
        if isinstance(shard, zerocast.sharded.MasterWeight):
            codes = shard.low_bit_all_gather.shards.storage
            expected[name] = unsharded_cast(
                parameter.full_tensor(), codes
            ).quantized_storage.buffers
    for module in (*model.blocks, model):
        module.unshard()
    compared, difference = 0, None
    weights = dict(model.named_parameters())
    for name, buffers in expected.items():
        for buffer, stored in weights[name].quantized_storage.buffers.items():
            compared += stored.nbytes
            difference = difference or first_difference(f"{name}.{buffer}", stored, buffers[buffer])
    return compared, difference


def run(arguments: argparse.Namespace, comm: Communicator) -> int:
    """Train, say what travels, compare; 0, or 1 where a byte is wrong."""
    recipe = RECIPES[arguments.recipe]
    model = sharded_model(recipe, fast_dtype(comm))
    report = zerocast.sharded.report(model)
    if comm.rank == 0:
        print(report, flush=True)
    train(model, arguments, comm)
    lines, difference = [], None
    bf16 = 2 * sum(parameter.shape.numel() for parameter in report.parameters)
    lines.append(
        f"an all-gather of all weights moves {report.gathered_bytes / 1e3:,.1f} kB; in BF16 it "
        f"would be {bf16 / 1e3:,.1f} kB"
    )
    if recipe is not None:
        compared, mine = wrong_byte(model)
        difference = next(filter(None, comm.all_gather_object(mine)), None)
        lines.append(
            f"The gathered weights equal the unsharded cast on every rank: {compared:,} bytes "
            f"compared on each of {comm.size}."
            if difference is None
            else f"WRONG: {difference}"
        )
    if comm.rank == 0:
        print("\n".join(lines), flush=True)
    return int(difference is not None)


def main() -> int:
    """The exit code of :func:`run` on the ranks of this job."""
    arguments = parse_arguments()
    with launched_process_group() as comm:
        if arguments.batch % comm.size:
            raise SystemExit(f"--batch {arguments.batch} must divide over {comm.size} ranks")
        return run(arguments, comm)


if __name__ == "__main__":
    sys.exit(main())
