"""Shards of an FSDP2 model as verl's or NeMo-RL's own classes hold them, compared with the whole.

Run by torchrun. Argument: ``verl`` or ``nemo_rl``.
"""

import sys

import torch
from torch.distributed.fsdp import fully_shard

import zerocast
from tests.sharded.sharded import BF16
from tests.support.models import Pair
from tests.support.same_bytes import assert_same_bytes
from zerocast.adapters.refit import nemo_rl, verl
from zerocast.refit import Refit


def check_verl(refit: Refit, whole: dict[str, torch.Tensor]) -> None:
    """A spec says where in the whole a rank's elements are, and who has the others."""
    from verl.workers.engine.spec import ShardSpec

    shards, peft_config = verl.EngineWeights(refit).get_per_tensor_param_shard()
    assert peft_config is None
    for name, values, spec in shards:
        assert isinstance(spec, ShardSpec)
        assert spec.full_shape == tuple(whole[name].shape)
        flat = whole[name].reshape(-1)[spec.place : spec.place + len(values)]
        assert_same_bytes(values, flat, name)
        assert torch.distributed.get_world_size(spec.gather_group) == ranks


def check_nemo_rl(refit: Refit, whole: dict[str, torch.Tensor]) -> None:
    """The local tensors of NeMo-RL's map are this rank's rows."""
    from nemo_rl.weight_sync.nccl_reshard_utils import HFToLocalParamMap

    local = nemo_rl.LocalShards(refit)
    found = local.build_hf_to_local_param_map({})
    assert isinstance(found, HFToLocalParamMap)
    local.cast()
    for name, tensor in whole.items():
        spec = found.specs[name]
        mine = spec.pre(spec.base).buf
        assert_same_bytes(mine, tensor.chunk(ranks)[torch.distributed.get_rank()], name)


torch.distributed.init_process_group("gloo")
ranks = torch.distributed.get_world_size()
torch.manual_seed(0)
model = Pair(norm=True)
zerocast.nn.convert(model, zerocast.Float8BlockScaling(), weights="master")
fully_shard(model, mp_policy=BF16)
# Of 128x128 blocks a rank's rows are no whole blocks; one scale a row is cut as its codes are.
options = {"from_masters": True, "dtype": torch.bfloat16}
sharded = Refit(model, "compressed-tensors/fp8-channel", **options)
tensors = dict(sharded.named_tensors())
{"verl": check_verl, "nemo_rl": check_nemo_rl}[sys.argv[1]](sharded, tensors)
print(f"rank {torch.distributed.get_rank()}: {len(tensors)} tensors are right")
torch.distributed.destroy_process_group()
