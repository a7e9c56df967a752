"""Linear: ``torch.nn.Linear`` with quantized products."""

import math
from typing import Any

import torch

from zerocast.arguments import (
    Device,
    check_device,
    check_dtype,
    check_flag,
    check_shape,
    check_text,
    present,
)
from zerocast.errors import InputError, UnsupportedError
from zerocast.nn.autocast import current_model_init
from zerocast.nn.layer_product import ProductInputs
from zerocast.nn.quantized_module import QuantizedModule
from zerocast.nn.saved_state import (
    WEIGHT_STATE,
    load_saved_state,
    reserve_state,
    state_to_load,
    state_to_save,
)
from zerocast.nn.traced_layer import eager_in_regions
from zerocast.recipes import Recipe
from zerocast.sharded.all_gather import LowBitAllGather, gather_of
from zerocast.sharded.amax_group import AmaxGroup
from zerocast.sharded.master_weight import MasterWeight, as_master_like, as_plain
from zerocast.sharded.parallel_linear import resolve
from zerocast.sharded.placement import is_sharded
from zerocast.tensors import QuantizedTensor, TensorParallelShard, quantize


def quantized_parameter(
    weight: torch.Tensor,
    recipe: Recipe | str,
    *,
    columnwise: bool = True,
    keep_init_val: bool = True,
    name: str | None = None,
) -> torch.nn.Parameter:
    """Return ``weight`` quantized; its present value is kept, on the CPU, for an optimizer's
    masters.

    For a weight on the meta device, the value that is copied into it later is kept. The random bits
    of stochastic rounding depend on ``name``.

    Raises:
        InputError: where the recipe cannot hold it.
    """
    quantized = quantize(weight, recipe, columnwise=columnwise, name=name)
    if weight.is_meta:
        quantized.quantized_storage.keeps_source = keep_init_val
    elif keep_init_val:
        value = weight.detach().to("cpu", copy=True).contiguous()
        quantized.quantized_storage.high_precision_init_val = value
    return torch.nn.Parameter(quantized, weight.requires_grad)


def master_parameter(
    weight: torch.Tensor, recipe: Recipe, *, name: str, for_linear: bool = True
) -> torch.nn.Parameter:
    """Return ``weight`` as a master of the same memory, shape and dtype; ``for_linear`` says
    whether it is that of a linear layer.
    """
    gather = LowBitAllGather(weight.shape, recipe, name, for_linear=for_linear)
    return torch.nn.Parameter(MasterWeight(weight.detach(), gather), weight.requires_grad)


def quantized_if_asked(
    weight: torch.Tensor, recipe: Recipe | str | None, *, columnwise: bool = True
) -> torch.Tensor:
    """Return ``weight`` quantized by ``recipe``, or by that of :func:`zerocast.model_init`; where
    there is neither, itself.

    The value before quantization is kept if ``recipe`` is given, and inside ``model_init`` if its
    option says so.
    """
    if recipe is not None:
        return quantized_parameter(weight, recipe, columnwise=columnwise)
    asked = current_model_init()
    if not asked.enabled or asked.recipe is None:
        return weight
    return quantized_parameter(
        weight,
        asked.recipe.for_role("weight"),
        columnwise=columnwise,
        keep_init_val=asked.preserve_high_precision_init_val,
    )


def reset_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Draw new values for weight [M, K] and bias [M], as ``torch.nn.Linear`` does; those of a
    quantized weight are quantized.
    """
    if isinstance(weight, QuantizedTensor):
        fresh = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        torch.nn.init.kaiming_uniform_(fresh, a=math.sqrt(5))
        with torch.no_grad():
            weight.copy_(fresh)
    else:  # in place, for it may be sharded
        torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] else 0
        torch.nn.init.uniform_(bias, -bound, bound)


def check_linear(
    in_features: int, out_features: int, bias: bool, device: Device, dtype: torch.dtype | None
) -> None:
    """Raise :class:`InputError` where no linear layer can be made of these."""
    check_shape("in_features and out_features", (in_features, out_features))
    check_flag("bias", bias)
    check_device("device", device)
    check_dtype("dtype", dtype)


def linear_parameters(
    in_features: int, out_features: int, bias: bool, device: Device, dtype: torch.dtype | None
) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
    """Return weight [M, K] and bias [M], or None, as ``torch.nn.Linear`` initializes them."""
    check_linear(in_features, out_features, bias, device, dtype)
    parameters = torch.nn.Linear(
        in_features, out_features, bias, device=device, dtype=dtype
    )._parameters
    return present(parameters["weight"]), parameters["bias"]


class Linear(QuantizedModule, torch.nn.Linear):
    """``y = x @ weight.T + bias``, as ``torch.nn.Linear``.

    Under :class:`zerocast.autocast` input, weight and gradient are quantized, and all three
    products are those of the quantized operands. Elsewhere a quantized weight is decoded.

    The parameters start from the same random numbers as ``torch.nn.Linear``'s. The weight holds
    codes where ``recipe`` or :func:`zerocast.model_init` say so; under autocast one in high
    precision is quantized in each forward.

    Args:
        in_features: K.
        out_features: M.
        bias: whether to add a bias [M], which stays in high precision.
        recipe: the scheme of a quantized weight; it must hold [M, K].
        device: where the parameters are.
        dtype: the nominal dtype of the weight, and the bias's dtype: FP32, BF16 or FP16.
        columnwise: whether a quantized weight holds the columnwise copy.
        name: under stochastic rounding, layers of different names draw different random bits;
            :func:`zerocast.nn.convert` names those of a model that have none.

    Raises:
        InputError: where the recipe cannot hold the weight; by a forward under autocast, where the
            recipe cannot hold the input or the gradient.
        StaleCopyError: by the forward, between a cast and its post-all-gather processing.
        ChangedWeightError: by the backward, where the weight was written since the forward.

    Attributes:
        low_bit_all_gather: whether FSDP2 gathers the weight in codes, so that a forward with
            anything else is an error.
        amax_group: the layers whose masters share one tensor amax with this one's; None if no
            other layer's does.
        tp_shard: what the weight is of a larger one, if it is in high precision, was split over
            ranks, and is no DTensor that says so.
    """

    # On the class, so that a module that convert changes into this class has them, too.
    low_bit_all_gather: bool = False
    amax_group: AmaxGroup | None = None
    tp_shard: TensorParallelShard | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str | None = None,
        columnwise: bool = True,
        name: str = "",
    ) -> None:
        check_linear(in_features, out_features, bias, device, dtype)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.name = check_text("name", name)
        self.weight = quantized_if_asked(self.weight, recipe, columnwise=columnwise)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register as torch does. A plain tensor that takes the place of a master becomes a master
        of the same gather; a weight that holds codes cannot be split over a mesh.

        Raises:
            UnsupportedError: where a DTensor would take the place of codes, and would hold none.
        """
        old = self._parameters.get(name)
        if old is not None and gather_of(old) is not None and type(param) is torch.nn.Parameter:
            # Code that splits weights may make tensors of them by operators that know no masters.
            param = torch.nn.Parameter(as_master_like(old, param), param.requires_grad)
        codes = isinstance(old, QuantizedTensor)
        if codes and param is not None and is_sharded(param):
            raise UnsupportedError(
                f"{self.name or type(self).__name__}: a weight that holds codes cannot be "
                "tensor-parallel, because it was cast whole and an optimizer would need its "
                "master; convert the model with weights='master', or with 'high_precision' and "
                "zerocast.autocast, before it is parallelized."
            )
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Draw new values for weight and bias, as ``torch.nn.Linear`` does, and quantize the
        weight.
        """
        reset_linear(self.weight, self.bias)

    @property
    def is_traceable(self) -> bool:
        """Whether torch.compile traces its quantized products: not where it is tensor-parallel."""
        return self.tp_shard is None and super().is_traceable

    @eager_in_regions
    def forward(self, input: torch.Tensor, *, fp8_output: bool = False) -> torch.Tensor:
        """[..., K] -> [..., M].

        With ``fp8_output`` the output is a :class:`zerocast.QuantizedTensor`, which the next layer
        multiplies as it is; only under autocast.
        """
        distributed = resolve(self)
        if distributed is None:
            given = ProductInputs(0, input, self.weight, self.bias, tp_shard=self.tp_shard)
            return self._product(given, fp8_output=fp8_output)[0]
        if fp8_output:
            raise InputError(
                f"{self.name}: fp8_output=True is for layers that are not tensor-parallel."
            )
        return distributed(input, self._of_this_rank)

    def _of_this_rank(self, *each: Any, tp_shard: TensorParallelShard | None) -> torch.Tensor:
        """Return the product of what this rank holds of input, weight and bias."""
        return self._product(ProductInputs(0, *each)._replace(tp_shard=tp_shard))[0]

    # --- state dicts ---

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        name = f"{prefix}weight"
        if not keep_vars and name in destination:
            # Dictionaries hold plain tensors, for any model and any checkpoint format.
            destination[name] = as_plain(destination[name])
        if WEIGHT_STATE in self._buffers:
            destination[prefix + WEIGHT_STATE] = state_to_save(self.weight)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        name = f"{prefix}weight"
        assigns = local_metadata.get("assign_to_params_buffers", False)
        if assigns and name in state_dict:
            state_dict[name] = as_master_like(self.weight, state_dict[name])
        saved = state_dict.pop(prefix + WEIGHT_STATE, None)
        state = state_to_load(self.weight, saved)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        if state is not None:
            load_saved_state(self.weight, state)
        if WEIGHT_STATE in self._buffers:
            reserve_state(self)  # again: the layer may have been on the meta device

    def extra_repr(self) -> str:
        """Return features and bias, as torch does, and the recipe of a quantized weight."""
        if not isinstance(self.weight, QuantizedTensor):
            return super().extra_repr()
        return f"{super().extra_repr()}, recipe={self.weight.recipe}"
