"""Train the byte-level GPT with tensor parallelism and FSDP2: each rank casts its part of a weight.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py --recipe nvfp4 --tensor-parallel 2
    mpirun -n 4 python -m mpi4py examples/tensor_parallel.py --recipe current --tensor-parallel 4

The options, the loop of training and its end are those of fsdp2.py. The styles are torch's, with
sequence parallelism: between the layers the stream is split in time. With ``--autocast`` and a
recipe of one scale a tensor, the inputs of layers are gathered in codes, too, by zerocast's styles.
It ends with what gathers of weights and of inputs move, and compares
every code that a rank multiplies with, and every value, with its part of the unsharded cast of the
whole masters by the reference backend; the exit code is 1 where one differs.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from fsdp2 import gather, options, region, say_verdict, train
from gpt.check import first_difference
from gpt.data import load_corpus, sample
from gpt.launch import fast_dtype, launched_process_group
from gpt.model import GPT, HeadByHead
from gpt.training import RECIPES
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerocast
from zerocast.comm import Communicator
from zerocast.nn.tensor_parallel import Float8ColwiseParallel

IN_CODES = ("current", "delayed")
"""Recipes with which inputs can be gathered in codes: those of one scale a tensor."""


def parallel_model(arguments: argparse.Namespace, mesh: DeviceMesh, dtype: torch.dtype) -> GPT:
    """The same on any number of ranks: FP32 masters, each layer's split over ``mesh["tp"]``, each
    part sharded over ``mesh["dp"]`` and gathered in codes.
    """
    torch.manual_seed(0)
    model = GPT(block=HeadByHead)
    zerocast.nn.convert(model, RECIPES[arguments.recipe], weights="master", filter_fqns=["head"])
    in_codes = arguments.autocast and arguments.recipe in IN_CODES
    column = Float8ColwiseParallel if in_codes else ColwiseParallel
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    replicated, in_time = Replicate(), Shard(1)
    for block in model.blocks:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention_in": column(input_layouts=in_time),
            "attention_out": RowwiseParallel(output_layouts=in_time),
            "mlp_norm": SequenceParallel(),
            "mlp_in": column(input_layouts=in_time),
            "mlp_out": RowwiseParallel(output_layouts=in_time),
        }
        parallelize_module(block, mesh["tp"], plan)
    ends = {
        "bytes": RowwiseParallel(input_layouts=replicated, use_local_output=False),
        "blocks.0": PrepareModuleInput(
            input_layouts=replicated, desired_input_layouts=in_time, use_local_output=True
        ),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=in_time, output_layouts=replicated),
    }
    parallelize_module(model, mesh["tp"], ends)
    distribute_module(model.positions, mesh["tp"])
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    return model


class Gathers(TorchDispatchMode):
    """Adds up what is all-gathered within the context.

    Attributes:
        bytes, elements: of what arrives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace and "gather" in func._schema.name:
            tensors = [t for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
            self.bytes += max(t.nbytes for t in tensors)
            self.elements += max(t.numel() for t in tensors)
        return out


def gathered_inputs(
    model: GPT, arguments: argparse.Namespace, mesh: DeviceMesh, comm: Communicator
) -> Gathers:
    """What one forward gathers besides weights. Collective."""
    for module in (*model.blocks, model):
        module.unshard()
    draw = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    corpus, sequences = load_corpus(), arguments.batch // mesh["dp"].size()
    text = sample(corpus.validation, sequences, GPT.context, draw)
    with torch.no_grad(), region(arguments, comm), Gathers() as gathers:
        model(*text)
    return gathers


def wrong_byte(model: GPT, mesh: DeviceMesh) -> tuple[int, str | None]:
    """How many bytes of codes and values were compared with this rank's part of the unsharded cast,
    and the first that differs. Collective.
    """
    compared, difference = 0, None
    expected = gather(model)
    weights = dict(model.named_parameters())
    for name, whole in expected.items():
        own = weights[name].to_local()
        pairs = {
            "rowwise_data": (own.rowwise_data, whole.rowwise_data),
            "value": (own.dequantize(torch.float32), whole.dequantize(torch.float32)),
        }
        for what, (stored, unsplit) in pairs.items():
            place = weights[name].placements
            tp_shard = distribute_tensor(unsplit, mesh["tp"], place, src_data_rank=None).to_local()
            compared += stored.nbytes
            difference = difference or first_difference(f"{name}.{what}", stored, tp_shard)
    return compared, difference


def run(arguments: argparse.Namespace, comm: Communicator) -> int:
    """Train, say what travels, compare; 0, or 1 where a byte is wrong."""
    split = arguments.tensor_parallel
    names = ("dp", "tp")
    mesh = init_device_mesh("cpu", (comm.size // split, split), mesh_dim_names=names)
    model = parallel_model(arguments, mesh, fast_dtype(comm))
    report = zerocast.sharded.report(model)
    if comm.rank == 0:
        print(report, flush=True)
    replica, replicas = mesh.get_local_rank("dp"), mesh["dp"].size()
    # Ranks that share layers read the same text.
    train(model, arguments, comm, replica=replica, replicas=replicas)
    inputs = gathered_inputs(model, arguments, mesh, comm)
    bf16 = 2 * sum(parameter.shape.numel() for parameter in report.parameters)
    lines = [
        f"an all-gather of all weights, split over {split} ranks, moves "
        f"{report.gathered_bytes / 1e3:,.1f} kB among {comm.size // split}; in BF16 it would be "
        f"{bf16 / 1e3:,.1f} kB",
        f"all-gathers of the inputs of a forward move {inputs.bytes / 1e3:,.1f} kB; in BF16 it "
        f"would be {2 * inputs.elements / 1e3:,.1f} kB",
    ]
    if comm.rank == 0:
        print("\n".join(lines), flush=True)
    return say_verdict(comm, *wrong_byte(model, mesh))


def main() -> int:
    """The exit code of :func:`run` on the ranks of this job."""
    parser = options(__doc__, [name for name, recipe in RECIPES.items() if recipe is not None])
    parser.add_argument("--tensor-parallel", type=int, default=2, help="ranks that share a layer")
    arguments = parser.parse_args()
    with launched_process_group() as comm:
        split = arguments.tensor_parallel
        if comm.size % split:
            raise SystemExit(f"--tensor-parallel {split} must divide {comm.size} ranks")
        if arguments.batch % (comm.size // split):
            replicas = comm.size // split
            raise SystemExit(f"--batch {arguments.batch} must divide over {replicas} replicas")
        return run(arguments, comm)


if __name__ == "__main__":
    sys.exit(main())
