"""Layers with TransformerEngine's arguments.

They are the layers of :mod:`zerocast.nn`, and are initialized like these, with the same random
numbers as torch's layers; ``init_method`` initializes a weight in another way.
"""

from collections.abc import Callable
from typing import Any

import torch

from zerocast import InputError, model_init, nn
from zerocast.adapters.transformer_engine.pytorch.quantizer import check_one_value
from zerocast.nn import LayerNorm, RMSNorm
from zerocast.nn.linear import quantized_if_asked

__all__ = ["LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm"]

_ONE_VALUE: dict[str, Any] = {
    "sequence_parallel": False, "tp_group": None, "tp_size": 1, "parallel_mode": None,
    "set_parallel_mode": False, "get_rng_state_tracker": None, "rng_tracker_name": None,
    "return_bias": False, "parameters_split": None, "return_layernorm_output_gathered": False,
    "ub_overlap_ag": False, "ub_overlap_rs": False, "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False, "ub_bulk_wgrad": False, "ub_name": None, "delay_wgrad_compute": False,
    "symmetric_ar_type": None, "save_original_input": False, "activation_params": None,
    "checkpoint": False, "seq_length": None, "micro_batch_size": None,
}  # fmt: skip
"""Arguments of TransformerEngine's layers that accept only their default."""

Init = Callable[[torch.Tensor], Any]


class _Arguments(torch.nn.Module):
    """A mixin that gives a layer of zerocast TransformerEngine's arguments.

    Args:
        sizes: the two sizes of the layer, and for layers with a norm ``eps``, if given by position.
            Further arguments of TransformerEngine must be given by name.
        init_method: called with the first weight in high precision, to fill it before it is
            quantized.
        output_layer_init_method: the same for the second weight, of LayerNormMLP.
        fuse_wgrad_accumulation: whether gradients of weights are added to ``weight.main_grad`` in
            the backward, while ``weight.grad`` stays None. They are first rounded to the weight's
            nominal dtype; TransformerEngine adds the FP32 sums of its GEMM.
        options: options of zerocast, and others of TransformerEngine at their defaults.

    Raises:
        InputError: for too many arguments by position.
        UnsupportedError: for another value than the default of these.
    """

    dtype_argument = "params_dtype"
    by_position: tuple[str, ...] = ("in_features", "out_features", "eps")

    def __init__(
        self,
        *sizes: Any,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        fuse_wgrad_accumulation: bool = False,
        **options: Any,
    ) -> None:
        if len(sizes) > len(self.by_position):
            raise InputError(
                f"{type(self).__name__} takes {', '.join(self.by_position)} by position and all "
                f"others by name, got {len(sizes)} by position."
            )
        given = {name: options.pop(name) for name in _ONE_VALUE if name in options}
        check_one_value(**{name: (value, _ONE_VALUE[name]) for name, value in given.items()})
        options["name"] = options.pop("name", None) or ""
        if "params_dtype" in options:
            options[self.dtype_argument] = options.pop("params_dtype")
        recipe, columnwise = options.pop("recipe", None), options.pop("columnwise", True)
        with model_init(enabled=False):
            super().__init__(*sizes, **options)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        methods = [init_method, output_layer_init_method]
        for (name, weight), method in zip(self._matrices(), methods, strict=False):
            if method is not None:
                with torch.no_grad():
                    method(weight)
            setattr(self, name, quantized_if_asked(weight, recipe, columnwise=columnwise))

    def _matrices(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the names and weights of the layer's products, in order."""
        return [(name, each) for name, each in self.named_parameters() if each.dim() == 2]

    def forward(
        self, input: torch.Tensor, is_first_microbatch: bool | None = None, **options: Any
    ) -> Any:
        """Run zerocast's layer; ``is_first_microbatch`` has no effect."""
        if self.fuse_wgrad_accumulation:
            for _, weight in self._matrices():
                hooks = weight._post_accumulate_grad_hooks or {}
                if _add_to_main_grad not in hooks.values():
                    weight.register_post_accumulate_grad_hook(_add_to_main_grad)
        return super().forward(input, **options)


def _add_to_main_grad(weight: torch.Tensor) -> None:
    main_grad = getattr(weight, "main_grad", None)
    if not isinstance(main_grad, torch.Tensor):
        raise InputError(
            "fuse_wgrad_accumulation=True needs weight.main_grad, a tensor of the weight's shape "
            "that gradients are added into, got none; set it before the backward."
        )
    assert weight.grad is not None
    main_grad.add_(weight.grad)
    weight.grad = None


class Linear(_Arguments, nn.Linear):
    """A :class:`zerocast.nn.Linear` with TransformerEngine's arguments."""

    dtype_argument = "dtype"
    by_position = ("in_features", "out_features")


class LayerNormLinear(_Arguments, nn.LayerNormLinear):
    """A :class:`zerocast.nn.LayerNormLinear` with TransformerEngine's arguments."""


class LayerNormMLP(_Arguments, nn.LayerNormMLP):
    """A :class:`zerocast.nn.LayerNormMLP` with TransformerEngine's arguments; its "gelu" is the
    tanh approximation, as in TransformerEngine.
    """

    by_position = ("hidden_size", "ffn_hidden_size", "eps")

    def __init__(self, *sizes: Any, activation: str = "gelu", **options: Any) -> None:
        activation = "gelu_tanh" if activation == "gelu" else activation
        super().__init__(*sizes, activation=activation, **options)
