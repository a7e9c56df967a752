"""Functions that :func:`install` puts in place of DeepSpeed's, for weights that hold codes.

Each takes the function that it replaces, then the arguments of that function.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerocast import QuantizedTensor, UnsupportedError, as_communicator
from zerocast.adapters.deepspeed.coded_groups import CodedGroups, coded_groups, is_coded
from zerocast.comm import Communicator
from zerocast.comm.agreement import check_same
from zerocast.tensors import QuantizedStorage

Theirs = Callable[..., Any]


def _is_quantized(tensor: object) -> bool:
    return isinstance(tensor, QuantizedTensor)


def _quantized(params: Iterable[Any]) -> list[QuantizedTensor]:
    return [param for param in params if isinstance(param, QuantizedTensor)]


# --- the engine ---


def check_configuration(
    theirs: Theirs, self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Raise :class:`UnsupportedError` for configurations that would train wrongly.

    This replaces the first function that gets the model, before the engine has changed it.
    """
    weights = _quantized(model.parameters())
    if not weights:
        return theirs(self, model, *args, **kwargs)
    config = self._config
    stage, zero = int(self.zero_optimization_stage()), config.zero_config
    accumulates_apart = stage == 1 and self.get_data_types() == (torch.bfloat16, torch.float32)
    refused = {
        "zero_optimization.stage=3, which shards the parameters themselves; use stage 1 or 2, or "
        "torch's FSDP2 with zerocast.nn.convert(weights='master')": stage == 3,
        "tensor_parallel.autotp_size, which cuts weights; use data parallelism": (
            self.autotp_size() > 1
        ),
        "expert_parallel, which replaces layers; leave it out": (
            getattr(config.expert_parallel_config, "enabled", False)
        ),
        "hybrid_engine, which replaces layers; leave it out": config.hybrid_engine.enabled,
        "pipeline parallelism; use data parallelism": self.pipeline_parallelism,
        "experts of deepspeed.moe; leave them out of the conversion": any(
            not getattr(weight, "allreduce", True) for weight in weights
        ),
    }
    if any(weight.requires_grad for weight in weights):
        refused |= {
            "zero_optimization.stage=0, which does not shard masters; use stage 1 or 2": stage == 0,
            "offload_optimizer, because a master must be on the device of its codes; leave it "
            "out": (getattr(zero.offload_optimizer, "device", "none") != "none"),
            "zenflow, which updates parts of a group at a time; leave it out": (
                zero.zenflow is not None
            ),
            "data_types.grad_accum_dtype='fp32' in stage 1 with BF16, for which DeepSpeed uses "
            "another optimizer; use stage 2, or leave it out": accumulates_apart,
            "compile.deepcompile, which reduces gradients differently; leave it out": (
                config.compile_config.deepcompile
            ),
        }
    for what, is_given in refused.items():
        if is_given:
            raise UnsupportedError(
                f"DeepSpeed cannot train a model whose weights hold codes under {what}."
            )
    return theirs(self, model, *args, **kwargs)


def change_nominal_dtype(
    theirs: Theirs, self: Any, param_dtype: torch.dtype | None, *args: Any, **kwargs: Any
) -> None:
    """Change the nominal dtype of weights to that of the training, and keep their codes."""
    for weight in _quantized(self.module.parameters()):
        if param_dtype not in (None, weight.dtype):
            storage = weight.quantized_storage.to(dtype=param_dtype)
            QuantizedTensor(storage).take_place_of(weight)
    theirs(self, param_dtype, *args, **kwargs)


def broadcast(theirs: Theirs, self: Any) -> None:
    """Broadcast the first rank's bytes, and the values that masters are initialized from.

    Raises:
        RankMismatchError: on every rank, if ranks have different kinds of quantized weights.
            Nothing has been sent.
    """
    if self.dist_backend is None:
        return
    group = self.seq_data_parallel_group
    comm = as_communicator(group)
    named = dict(self.module.named_parameters())
    plain = {name: param for name, param in named.items() if not _is_quantized(param)}
    storages = {name: p.quantized_storage for name, p in named.items() if _is_quantized(p)}
    _check_kinds(comm, storages)
    self.module.named_parameters = lambda *_, **__: iter(plain.items())
    try:
        theirs(self)  # now sees only unquantized parameters
    finally:
        del self.module.named_parameters
    for name, storage in storages.items():
        value = storage.high_precision_init_val
        dist.broadcast(named[name].data, dist.get_global_rank(group, 0), group)
        if value is not None:
            value = value.clone()
            comm.broadcast_(value)
            storage.high_precision_init_val = value


def _check_kinds(comm: Communicator, storages: Mapping[str, QuantizedStorage]) -> None:
    """Check that all ranks send the same kinds of weights. Collective, also without any weight."""
    check_same(
        comm,
        [
            f"{name} {tuple(each.shape)} {each.recipe}, "
            f"{'with' if each.high_precision_init_val is not None else 'without'} its first value"
            for name, each in storages.items()
        ],
        "every rank must build and convert the same model, with the same quantized weights",
    )


def shared_params(theirs: Theirs, self: Any) -> dict[str, str]:
    """Map each other name of a shared weight to its first name.

    Quantized weights are compared by object, since they have no memory that identifies them.
    """
    named = list(self.module.named_parameters(remove_duplicate=False))
    if not _quantized(param for _, param in named):
        return dict(theirs(self))
    first: dict[int, str] = {}
    shared = {}
    for name, param in named:
        place = id(param) if _is_quantized(param) else param.data_ptr()
        if first.setdefault(place, name) != name:
            shared[name] = first[place]
    return shared


# --- the optimizer ---


def flatten_values(
    theirs: Theirs, self: Any, tensor_list: Sequence[torch.Tensor], *args: Any, **kwargs: Any
) -> Any:
    """Flatten the values that masters are initialized from.

    These are the source of the codes if a weight keeps it, else the decoded codes.
    """
    return theirs(self, [_start(tensor) for tensor in tensor_list], *args, **kwargs)


def _start(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, QuantizedTensor):
        return tensor
    kept = tensor.quantized_storage.high_precision_init_val
    return tensor.dequantize() if kept is None else kept.to(tensor.device, tensor.dtype)


def point_to_flat(theirs: Theirs, self: Any, group_index: int) -> None:
    """Do nothing for a group that holds codes, whose weights stay in their buffers."""
    if not any(map(_is_quantized, self.round_robin_bit16_groups[group_index])):
        theirs(self, group_index)


def take_over(theirs: Theirs, self: Any) -> None:
    """Replace the 16-bit ranges of groups that hold codes by :class:`CodedGroups`, once masters
    exist.
    """
    groups = self.round_robin_bit16_groups
    coded = [i for i, params in enumerate(groups) if any(map(_is_quantized, params))]
    flats = self.bit16_groups_flat
    if coded and coded_groups(flats) is None:
        made = CodedGroups(self)
        for i in coded:
            flats[i] = torch.empty_like(flats[i], device="meta")
            flats[i].zerocast_groups = made
            self.parallel_partitioned_bit16_groups[i] = self.get_data_parallel_partitions(
                flats[i], i
            )
        made.publish()
    theirs(self)
    for i in coded:  # DeepSpeed has linked a decoded value to each weight, besides its master
        for weight in _quantized(groups[i]):
            linked: Any = getattr(weight, "_hp_mapping", None)
            if linked is not None:
                linked.lp_fragment = None


def cast_and_gather(
    theirs: Theirs,
    groups_flat: Sequence[Any],
    partitioned_param_groups: Sequence[Any],
    dp_process_group: Sequence[Any],
    **options: Any,
) -> None:
    """Cast the groups that hold codes and gather the codes; call DeepSpeed for other groups."""
    made = coded_groups(groups_flat)
    if made is not None:
        made.publish()
    others = [i for i, flat in enumerate(groups_flat) if not is_coded(flat)]
    theirs(
        groups_flat=[groups_flat[i] for i in others],
        partitioned_param_groups=[partitioned_param_groups[i] for i in others],
        dp_process_group=[dp_process_group[i] for i in others],
        **options,
    )


@torch.no_grad()
def restart_masters(theirs: Theirs, self: Any) -> None:
    """Initialize masters from the weights; 16-bit ranges of these exist during this call only."""
    partitions = self.parallel_partitioned_bit16_groups
    flats = {i: flat for i, flat in enumerate(self.bit16_groups_flat) if is_coded(flat)}
    for i in flats:
        values = self.flatten_dense_tensors_aligned(
            self.round_robin_bit16_groups[i],
            self.nccl_start_alignment_factor * self.partition_count[i],
            param_padding=self.round_robin_bit16_padding[i],
        )
        partitions[i] = self.get_data_parallel_partitions(values, i)
    try:
        theirs(self)
    finally:
        for i, flat in flats.items():
            partitions[i] = self.get_data_parallel_partitions(flat, i)


def check_offload(
    theirs: Theirs, self: Any, include: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Raise :class:`UnsupportedError` if masters or weights that hold codes would be offloaded."""
    moved = {"hp_params", "lp_params"}
    if include is not None:
        moved &= {str(getattr(state, "value", state)) for state in include}
    if moved and coded_groups(self.bit16_groups_flat) is not None:
        raise UnsupportedError(
            "masters must be on the device of the weights that hold their codes, got "
            f"offload_states of {', '.join(sorted(moved))}; give "
            "include=[OffloadStateTypeEnum.optim_states]."
        )
    theirs(self, include, *args, **kwargs)
