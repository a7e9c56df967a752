"""Experts [E, M, K] that tensor parallelism splits and FSDP2 shards: each matrix has the codes of
the whole's cast, and a module computes with the values of its part.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zerocast
from tests.sharded.sharded import BF16, adamw, feed, gathered, reshard, whole_masters
from tests.support.claims import assert_same_tensors, message_of, stored
from tests.support.exports import contents
from tests.support.ranks import on_gloo, shared_folder
from tests.support.recipes import STATELESS, each
from tests.support.same_bytes import assert_same_bytes
from zerocast.export import save_pretrained

SHAPES = {"gate_up_proj": (3, 512, 256), "down_proj": (3, 256, 256)}
DIMS = {"matrices": (0, 0), "rows and columns": (1, 2), "columns and rows": (2, 1)}
"""Of ``gate_up_proj`` and ``down_proj`` the dimension that is split."""


class Experts(torch.nn.Module):
    """Three experts of other magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        spread = torch.logspace(-3, 3, 3).view(3, 1, 1)
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape) * spread))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all that this rank has, so that every element has a gradient."""
        local = [p.to_local() if isinstance(p, DTensor) else p for p in self.parameters()]
        return sum((each.float().sum() for each in local), start=x.float().sum())


def model() -> torch.nn.ModuleDict:
    """The same on every rank."""
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"experts": Experts()})


def split(own: torch.nn.ModuleDict, dims: tuple[int, int], tp: int) -> torch.nn.ModuleDict:
    """Over ``tp`` ranks in these dimensions, as a parallel style does, and over the others by
    FSDP2.
    """
    dp = torch.distributed.get_world_size() // tp
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    experts = own["experts"]
    for (name, parameter), dim in zip(list(experts.named_parameters()), dims, strict=True):
        part = distribute_tensor(parameter, mesh["tp"], [Shard(dim)], src_data_rank=None)
        experts.register_parameter(name, torch.nn.Parameter(part))
    fully_shard(experts, mesh=mesh["dp"], mp_policy=BF16)
    return own


def converted(recipe) -> torch.nn.ModuleDict:
    """Whose masters are gathered in codes."""
    own = model()
    zerocast.nn.convert(own, recipe, weights="master", include=["experts"], strict=True)
    return own


@on_gloo(4)
@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
@each(*STATELESS, slow={*STATELESS} - {"nvfp4", "block"})
def test_parts_have_the_values_of_the_whole_cast(comm, recipe, dims):
    """Of every matrix, after steps with given gradients, which leave the masters of plain tensors;
    on 2 x 2 ranks, three experts over two.
    """
    own, plain = split(converted(recipe), dims, 2), model()
    optimizers = [adamw(plain.parameters()), adamw(own.parameters())]
    for step in range(2):
        own["experts"](torch.ones(1)).backward()
        for each_one in (plain, own):
            feed(each_one.parameters(), step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step:
            zerocast.sharded.precompute_scales_for_fsdp(own)
        masters, weights = whole_masters(own), gathered(own)
        assert_same_tensors(masters, stored(dict(plain.named_parameters())), f"step {step}")
        for name, weight in weights.items():
            value = torch.stack(
                [
                    zerocast.quantize(matrix, recipe, dtype=torch.bfloat16).dequantize()
                    for matrix in masters[name]
                ]
            )
            part = distribute_tensor(
                value, weight.device_mesh, weight.placements, src_data_rank=None
            )
            assert_same_bytes(weight.to_local().detach(), part.to_local(), f"{name}, step {step}")
        reshard(own)


@on_gloo(4)
@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
def test_files_are_those_of_the_whole_model_on_one_rank(comm, dims):
    """By the bytes of training and anew from masters, in a dialect that has projections alone and
    in one that fuses them.
    """
    folder = shared_folder(comm)
    alone = zerocast.comm.SingleRank()
    for name, recipe in (
        ("compressed-tensors/nvfp4", zerocast.NVFP4BlockScaling()),
        ("deepseek/fp8", zerocast.Float8BlockScaling()),
        ("gpt-oss/mxfp4", zerocast.MXFP4BlockScaling(enable_2d_quantization=True)),
    ):
        own = split(converted(recipe), dims, 2)
        for from_masters in (False, True):
            paths = [folder / f"{name.replace('/', '-')}{from_masters}{kind}" for kind in "ab"]
            options = {"dialect": name, "from_masters": from_masters, "bucket_bytes": 50_000}
            save_pretrained(own, paths[0], dtype=torch.bfloat16, **options)
            if comm.rank == 0:
                whole = model().bfloat16()
                trained = recipe if not from_masters else zerocast.export.DIALECTS[name].recipe
                zerocast.nn.convert(
                    whole, trained, weights="quantized", include=["experts"], strict=True
                )
                options["from_masters"] = False
                save_pretrained(whole, paths[1], group=alone, **options)
                assert contents(paths[0]) == contents(paths[1]), (name, from_masters)
            comm.barrier()


@on_gloo(4)
def test_parts_inside_a_block_are_refused_by_name(comm):
    """256 rows over four ranks, in blocks of 128."""
    own = split(converted("block"), (1, 1), 4)
    message = message_of(zerocast.InputError, lambda: own["experts"](torch.ones(1)))
    assert "experts.down_proj: a shard of a weight under Float8BlockScaling must begin" in message
