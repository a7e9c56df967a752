"""Trains a small GPT of Megatron-Core, unmodified, by its distributed optimizer on gloo's ranks.

    train_by_megatron.py RECIPE... [--tp N] [--hidden N] [--ffn N] [--steps N] [--overlap]
                         [--offload] [--precision-aware] [--hybrid]
                         [--alike] [--save DIR | --load DIR]

With every recipe anew. After every step each byte of each weight, on every rank, must be that of
quantizing the masters as the ranks hold them together. RECIPE is a name of zerocast's,
one of OTHERS, or ``bf16`` for none. What one step sends is counted at the end.

--hybrid trains a HybridModel of the same layers instead of a GPTModel.

--alike gives all ranks the same batch and clips no gradient, so that any power of two of them take
the same steps, bit for bit.

--save writes a checkpoint halfway, trains on, then loads it into another model and repeats the
second half. --load continues from one, on as many ranks as there are. Both print a digest of what
the ranks hold together: masters, codes and scales.
"""

import argparse
import collections
import contextlib
import copy
import hashlib
import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.utils._pytree import tree_leaves

import zerocast
import zerocast.adapters.megatron
from tests.support.collectives import Collectives
from tests.support.megatron_on_cpu import on_cpu, with_fused_adam

VOCABULARY, SEQUENCE = 128, 32
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}

OTHERS = {
    "mxfp8-2d": zerocast.MXFP8BlockScaling(enable_2d_quantization=True),
    "delayed-margin": zerocast.DelayedScaling(margin=1),
}


class Sent(Collectives):
    """Counts the bytes of each operation and dtype: of what goes in or comes out, the longer."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.calls.total()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.calls.total() > before:
            name = func._schema.name.partition("::")[2]
            tensors = [[t for t in tree_leaves(arg) if isinstance(t, torch.Tensor)] for arg in args]
            for tensor in max(tensors, key=lambda each: sum(t.nbytes for t in each)):
                self.kinds[f"{name.strip('_')}:{str(tensor.dtype)[6:]}"] += tensor.nbytes
        return out


def hybrid_model(config: TransformerConfig) -> torch.nn.Module:
    """A HybridModel of a GPTModel's layers, attention and MLP in turn. It has no last norm, which
    HybridStack takes from TransformerEngine alone.
    """
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer

    whole, config.num_layers = get_gpt_layer_local_spec().submodules, 2 * config.num_layers
    parts = {
        layer: {name: getattr(whole, name) for name in names.split()}
        for layer, names in {
            TransformerLayer: "input_layernorm self_attention self_attn_bda",
            MLPLayer: "pre_mlp_layernorm mlp mlp_bda",
        }.items()
    }
    attention, mlp = (
        ModuleSpec(layer, submodules=TransformerLayerSubmodules(**own))
        for layer, own in parts.items()
    )
    stack = ModuleSpec(
        HybridStack, params={"post_layer_norm": False},
        submodules=HybridStackSubmodules(attention_layer=attention, mlp_layer=mlp),
    )  # fmt: skip
    return HybridModel(
        config, stack, VOCABULARY, SEQUENCE, hybrid_layer_pattern="*-" * (config.num_layers // 2),
        position_embedding_type="learned_absolute",
    )  # fmt: skip


class Training:
    """A model in the codes of a recipe, its optimizer, and the number of the next step."""

    def __init__(self, name: str, seed: int, args: argparse.Namespace) -> None:
        torch.manual_seed(seed)
        config = TransformerConfig(
            num_layers=2, hidden_size=args.hidden, num_attention_heads=4,
            ffn_hidden_size=args.ffn or 4 * args.hidden,
            use_cpu_initialization=True, tensor_model_parallel_size=args.tp,
            gradient_accumulation_fusion=False, hidden_dropout=0, attention_dropout=0, **BF16,
        )  # fmt: skip
        if args.hybrid:
            model = hybrid_model(config).bfloat16()
        else:
            model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE).bfloat16()
        flags = {"use_distributed_optimizer": True}
        if args.overlap:
            flags |= {
                "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000
            }  # fmt: skip
        self.has_codes = name != "bf16"
        if self.has_codes:
            recipe = OTHERS.get(name, name)
            zerocast.adapters.megatron.install()
            zerocast.adapters.megatron.quantize_linears(model, recipe, skip=["output_layer"])
            flags[f"fp{4 if name.endswith('fp4') else 8}_param_gather"] = True
        self.ddp = DistributedDataParallel(config, DistributedDataParallelConfig(**flags), model)
        options = dict(BF16)
        if args.offload:
            options |= {
                "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5,
                "pin_cpu_grads": False, "overlap_cpu_optimizer_d2h_h2d": True,
            }  # fmt: skip
        if args.precision_aware:
            options |= {
                "use_precision_aware_optimizer": True, "fp8_recipe": "blockwise",
                "exp_avg_dtype": torch.bfloat16,
            }  # fmt: skip
        with with_fused_adam() if args.precision_aware else contextlib.nullcontext():
            options = OptimizerConfig(
                optimizer="adam", lr=1e-3, use_distributed_optimizer=True,
                overlap_param_gather=args.overlap, clip_grad=0.0 if args.alike else 1.0, **options,
            )  # fmt: skip
            self.optimizer = get_megatron_optimizer(options, [self.ddp])
        self.args, self.step, self.unsharded = args, 0, {}
        if self.has_codes:
            self.unsharded = {weight: copy.deepcopy(weight) for weight, *_ in self.masters()}

    def train(self, steps: int) -> None:
        """Take steps until ``steps`` are done; say of each what it found."""
        while self.step < steps:
            loss = self.take_step()
            found = [] if not self.has_codes else self.look()
            if dist.get_rank() == 0:
                print(f"step {self.step}: loss {loss:.4f}", *found, flush=True)
            self.step += 1

    def take_step(self) -> float:
        """Train on a batch that depends on the step and the rank alone."""
        seed = 1000 * self.step
        seed += 0 if self.args.alike else parallel_state.get_data_parallel_rank()
        random = torch.Generator().manual_seed(seed)
        batch = torch.randint(VOCABULARY // 4, (2, SEQUENCE), generator=random)
        places = torch.arange(SEQUENCE).expand(2, SEQUENCE)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.ddp(batch, places, None, labels=batch).float().mean()
        loss.backward()
        self.ddp.finish_grad_sync()
        self.optimizer.step()
        if self.args.overlap:  # what the next forward would wait for
            self.ddp.start_param_sync(force_sync=True)
        return loss.item()

    @torch.no_grad()
    def look(self) -> list[str]:
        """Say how many weights there are, how many of their bytes are not those of the cast, and
        the digest.
        """
        weights, wrong, digest = 0, torch.zeros(1, dtype=torch.int64), hashlib.sha256()
        for weight, master, start, group in self.masters():
            whole = torch.zeros(weight.numel())
            if master is not None:
                whole[start : start + master.numel()] = master
            dist.all_reduce(whole, group=group)
            whole = whole.view(weight.shape)
            digest.update(whole.numpy().tobytes())
            if weight.recipe.state:  # of all casts since the weight was made
                cast = self.unsharded[weight].copy_(whole)
            else:
                cast = zerocast.quantize(whole.to(weight.dtype), weight.recipe)
            for name, held in weight.quantized_storage.buffers.items():
                expected = cast.quantized_storage.buffers[name].view(torch.uint8)
                wrong += (held.view(torch.uint8) != expected).sum()
                digest.update(held.view(torch.uint8).numpy().tobytes())
            weights += 1
        dist.all_reduce(wrong)
        assert wrong == 0, f"{wrong.item()} bytes differ from the cast of the gathered masters"
        return [f"{weights} weights, {wrong.item()} bytes, {digest.hexdigest()[:16]}"]

    def masters(self):
        """Yield each quantized weight with this rank's master, its start, and the ranks."""
        for each in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            lists = each._get_fp8_params_and_shard_fp32_from_fp8()
            if getattr(each.ddp_config, "fp4_param_gather", False):
                lists = each._get_nvfp4_params_and_shard_fp32_from_nvfp4()
            yield from zip(*lists, itertools.repeat(each.data_parallel_group))

    def state(self, is_loading: bool) -> dict:
        """Everything, in Megatron-Core's form for checkpoints that any number of ranks loads."""
        model = self.ddp.module.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        """Write a torch_dist checkpoint."""
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(self.state(is_loading=False), folder)

    def load(self, folder: Path, step: int) -> None:
        """Continue from a checkpoint, after a step: torch's AdamW has no state before the first."""
        self.take_step()
        state = dist_checkpointing.load(self.state(is_loading=True), folder)
        self.ddp.module.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = step
        for weight, whole in self.unsharded.items():
            for name in weight.recipe.state:
                held = weight.quantized_storage.buffers[name]
                whole.quantized_storage.buffers[name].copy_(held)
            weight.recipe.rewind(whole.quantized_storage.buffers)
        found = self.look() if self.has_codes else []
        if dist.get_rank() == 0:
            print("loaded:", *found)


def main() -> None:
    """Train on one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--ffn", type=int)
    parser.add_argument("--steps", type=int, default=20)
    for flag in ("--overlap", "--offload", "--precision-aware", "--hybrid", "--alike"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(args.tp)
    for name in args.recipes:
        if dist.get_rank() == 0:
            print("recipe", name)
        training, half = Training(name, 0, args), args.steps // 2
        if args.load:
            training.load(args.load / name, half)
        if args.save:
            training.train(half)
            training.save(args.save / name)
        training.train(args.steps)
        if args.save:
            again = Training(name, 1, args)
            again.load(args.save / name, half)
            again.train(args.steps)
        with Sent() as sent:
            training.take_step()
        if dist.get_rank() == 0:
            print("sent", *(f"{kind} {count}" for kind, count in sorted(sent.kinds.items())))
        zerocast.adapters.megatron.uninstall()
    dist.destroy_process_group()


if __name__ == "__main__":  # a save starts a process that imports this file
    with on_cpu():
        main()
