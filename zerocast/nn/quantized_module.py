"""QuantizedModule: what the layers with quantized products have in common.

A layer that runs under :class:`zerocast.autocast` has a :class:`RecipeState` for its forward and
one for its backward, made when a recipe first meets it, and the quantizers of its GEMMs, which
remember there. Both move, copy and save with the module: what a recipe remembers is the module's
extra state. It is in a ``state_dict`` only where something is remembered, so that dictionaries are
exchanged with torch's own layers.

Which of three ways a product goes:

    autocast             both operands quantized (:class:`zerocast.nn.products.QuantizedLinear`)
    a quantized weight   decoded, times the input as it is (:class:`WeightOnlyLinear`)
    neither              ``torch.nn.functional.linear``

In the last two, amaxes are recorded beside it where autocast calibrates.

Inside ``torch.compile`` a quantized weight is decoded in the graph, which is entered only where its
derived copies are true. Under a region of autocast the products are operations of the graph
(:mod:`zerocast.nn.traced_linear`), where the recipe remembers nothing; elsewhere it breaks there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch

from zerocast import context
from zerocast.context import Autocast
from zerocast.errors import InputError, UnsupportedError
from zerocast.fsdp.parts import all_parts, check_cuts
from zerocast.fsdp.sharded import replicated_like
from zerocast.nn.derivatives import is_transformed, refuse_transforms
from zerocast.nn.products import GemmQuantizers, QuantizedLinear, Watch
from zerocast.nn.recomputation import as_in_first_run
from zerocast.nn.saved_state import pack, recipe_to_values, unpack
from zerocast.nn.statistics import observer
from zerocast.nn.traced_linear import traced_linear
from zerocast.nn.weight_only import WeightOnlyLinear
from zerocast.recipes import Recipe
from zerocast.tensors import Part, QuantizedTensor, Quantizer, RecipeState, rebuild_derived

Forward = TypeVar("Forward", bound=Callable[..., Any])

_EXTRA_STATE = "_extra_state"  # torch's name, which follows the module's prefix


class Quantizing(NamedTuple):
    """How the input of a product is quantized where it is made: by what, rounded to what first, and
    who is shown.
    """

    quantizer: Quantizer
    dtype: torch.dtype
    watch: Watch | None


class QuantizedModule(torch.nn.Module):
    """A module whose linear products are quantized under autocast.

    Attributes:
        gemms: how many linear products it has.
        name: under stochastic rounding, layers of different names draw different random words.
            :func:`zerocast.nn.convert` gives each layer its name in the model.
        is_traceable: whether torch.compile traces its quantized products.
    """

    gemms: ClassVar[int] = 1
    # On the class, so that a module which convert turns into this one has them, too.
    name: str = ""
    _states: tuple[RecipeState, RecipeState] | None = None
    _loaded: torch.Tensor | None = None  # a saved state, until a forward under its recipe
    _quantizers: list[GemmQuantizers]
    is_traceable: bool = False
    _latest_recipe: Recipe | None = None  # of the latest forward, where a region was active

    # --- products ---

    def _linear(
        self,
        gemm: int,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        leading: Sequence[int] | None = None,
        fp8_output: bool = False,
        part: Part | None = None,
    ) -> torch.Tensor:
        """Product number ``gemm`` of this module: [..., K] -> [..., M].

        ``leading`` are the leading dimensions of the result, where those of ``input`` were
        flattened; ``part`` says which part of a larger one the weight is.

        Raises:
            InputError: for ``fp8_output`` outside of autocast; under it, where the recipe cannot
                hold a tensor that has to be quantized.
        """
        leading = tuple(input.shape[:-1] if leading is None else leading)
        if torch.compiler.is_compiling() and not fp8_output:
            recipe = self._traced_recipe()
            if recipe in (context.NO_REGION, context.HIGH_PRECISION) or not input.numel():
                return torch.nn.functional.linear(input, weight, bias)
            return _traced(input, weight, bias, recipe)
        region = context.current()
        # Where the weight is cut, a rank may have no columns of rows that there are.
        if region.enabled and (input.numel() or (part and math.prod(leading))):
            return self._quantized_linear(
                region, gemm, input, weight, bias, leading, fp8_output, part
            )
        if fp8_output:
            raise InputError(
                "fp8_output=True needs zerocast.autocast(enabled=True) around the layer, whose "
                "recipe says how the output is quantized."
            )
        input, bias, dtype = _cast(input, weight, bias)
        if isinstance(weight, QuantizedTensor):
            _prepare(weight)
        if isinstance(weight, QuantizedTensor) and not is_transformed():
            out = WeightOnlyLinear.apply(input, weight, bias, dtype)
        else:
            out = torch.nn.functional.linear(input, weight, bias)
        if region.enabled or region.calibrating:
            # A rank without rows takes part, too: the states of all ranks join in one order.
            quantizers = self._enrolled(region, input.device)[gemm]
            quantizers.weight.part = part
            if input.numel():
                _calibrate(quantizers, input, weight, out)
        return out

    def _traced_recipe(self) -> str:
        """What counts for this layer in a function that is being compiled."""
        return context.traced_recipe()

    def _quantized_linear(
        self,
        region: Autocast,
        gemm: int,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        leading: tuple[int, ...],
        fp8_output: bool,
        part: Part | None,
    ) -> torch.Tensor:
        if isinstance(weight, QuantizedTensor):
            _prepare(weight)
        quantizers = self._enrolled(region, input.device)[gemm]
        quantizers.weight.part = part
        if isinstance(input, QuantizedTensor):
            dtype = input.dtype
            bias = None if bias is None else bias.to(dtype)
        else:
            input, bias, dtype = _cast(input, weight, bias)
            _check_dtype(input, dtype)
            input = input.reshape(-1, input.shape[-1])
        _check_shapes(quantizers, input, weight, part)
        watch = observer(self, gemm)
        output_shape = (*leading, weight.shape[0]) if fp8_output else None
        out = QuantizedLinear.apply(input, weight, bias, quantizers, dtype, output_shape, watch)
        if fp8_output:
            return out
        # Not a view, as torch's own is none: FSDP2 warns of modules that return views.
        return torch.ops.aten._unsafe_view(out, (*leading, weight.shape[0]))

    def _quantizing(
        self, gemm: int, source: torch.Tensor, weight: torch.Tensor
    ) -> Quantizing | None:
        """How the input of product ``gemm`` is quantized where it is made from ``source``; None
        where it is not.
        """
        if torch.compiler.is_compiling():
            return None
        region = context.current()
        if not region.enabled or not source.numel():
            return None
        quantizers = self._enrolled(region, source.device)[gemm]
        rows = source.numel() // source.shape[-1]
        _require_holds(quantizers.input.recipe, (rows, weight.shape[1]), "input")
        columnwise = torch.is_grad_enabled() and weight.requires_grad
        quantizers.input.set_usage(rowwise=True, columnwise=columnwise)
        dtype = _cast(source.new_empty(0), weight, None)[2]
        return Quantizing(quantizers.input, dtype, observer(self, gemm))

    # --- moving and converting ---

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """As torch's, by which ``to``, ``cuda``, ``half`` and others work, but for quantized
        parameters: torch would put another object's attributes and hooks in the place of theirs,
        and refuse those that anybody refers to weakly.
        """
        own: dict[str, QuantizedTensor] = {}
        for name, parameter in self._parameters.items():
            if isinstance(parameter, QuantizedTensor):
                grad = parameter.grad
                with torch.no_grad():
                    applied = fn(parameter)
                    if not isinstance(applied, QuantizedTensor):
                        continue  # another dtype than a weight can have: torch makes it plain
                    if applied.quantized_storage is not parameter.quantized_storage:
                        parameter.grad = None
                        applied.take_place_of(parameter)
                    if grad is not None:
                        parameter.grad = fn(grad)
                own[name] = parameter
        self._parameters.update(dict.fromkeys(own))
        try:
            return super()._apply(fn, recurse)
        finally:
            self._parameters.update(own)  # type: ignore[arg-type]

    # --- the recipe's state ---

    def _enrolled(self, region: Autocast, device: torch.device) -> list[GemmQuantizers]:
        """The quantizers of each GEMM under the recipe of ``region``, which reduces their
        amaxes.
        """
        recipe = region.recipe
        assert recipe is not None
        refuse_transforms(self.name or type(self).__name__)
        if self._states is None or self._states[0].recipe != recipe:
            self._remember(recipe, device)
        assert self._states is not None
        for state in self._states:
            state.to(device)
        region.enrol(*self._states)
        return self._quantizers

    def _remember(self, recipe: Recipe, device: torch.device) -> None:
        """Start anew under ``recipe``."""
        forward = RecipeState.create(recipe, "forward", 3 * self.gemms, device, name=self.name)
        backward = RecipeState.create(recipe, "backward", 2 * self.gemms, device, name=self.name)
        self._states = forward, backward
        three, two = iter(forward.make_quantizers()), iter(backward.make_quantizers())
        self._quantizers = [
            GemmQuantizers(next(three), next(three), next(three), next(two), next(two))
            for _ in range(self.gemms)
        ]
        self._go_on(self._states)

    def _go_on(self, states: Sequence[RecipeState]) -> None:
        """Load what was saved under the recipe of these new ``states``, where it was."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        owner, tensors = unpack(loaded, self.name)
        if owner["recipe"] == recipe_to_values(states[0].recipe):
            for state in states:
                names = {f"{state.mode}.{name}": name for name in state.state_dict()}
                state.load_state_dict({names[n]: t for n, t in tensors.items() if n in names})

    def get_extra_state(self) -> torch.Tensor | None:
        """What the recipe remembers for this layer, as one tensor
        (:mod:`zerocast.nn.saved_state`); None where it remembers nothing.
        """
        packed = self._loaded
        if self._states is not None:
            tensors = {
                f"{state.mode}.{name}": tensor
                for state in self._states
                for name, tensor in state.state_dict().items()
            }
            owner = {"gemms": self.gemms, "recipe": recipe_to_values(self._states[0].recipe)}
            packed = pack(owner, tensors) if tensors else None
        return None if packed is None else replicated_like(self.parameters(), packed)

    def set_extra_state(self, state: object) -> None:
        """Go on from what :meth:`get_extra_state` gave, from the next forward under its recipe on.

        Anything but a tensor stands for no state, as does the placeholder of torch's
        ``set_model_state_dict`` for an entry that a full state dict lacks.

        Raises:
            InputError: where it was made by another kind of layer, or is no state at all.
        """
        if not isinstance(state, torch.Tensor | dict):
            return
        owner, tensors = unpack(state, self.name)
        if owner.get("gemms") != self.gemms:
            raise InputError(
                f"what recipes remember for {self.name} must be that of a {type(self).__name__}, "
                f"of {self.gemms} products, got one of {owner.get('gemms')}; take its "
                f"'_extra_state' out of the state dict to start anew."
            )
        self._states, self._loaded = None, pack(owner, tensors)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if destination[prefix + _EXTRA_STATE] is None:
            del destination[prefix + _EXTRA_STATE]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *others: Any,
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            self._fill_quantized(state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, *others
        )
        if prefix + _EXTRA_STATE in missing_keys:
            missing_keys.remove(prefix + _EXTRA_STATE)

    def _fill_quantized(self, state_dict: Any, prefix: str) -> None:
        """Copy into quantized parameters what torch would assign in their place, which would hold
        no codes, and be none of the parameters that optimizers and plans know.
        """
        for name, parameter in self._parameters.items():
            given = state_dict.get(prefix + name)
            if not (isinstance(parameter, QuantizedTensor) and isinstance(given, torch.Tensor)):
                continue
            if given.shape == parameter.shape and given is not parameter:
                if parameter.is_meta and not given.is_meta:
                    torch.empty_like(parameter, device=given.device).take_place_of(parameter)
                with torch.no_grad():
                    parameter.copy_(given)
                state_dict[prefix + name] = parameter


def eager_in_regions(forward: Forward) -> Forward:
    """Let torch.compile leave out a layer's ``forward`` where a region of autocast is open.

    A graph that holds the layer is guarded by there being none. (``torch.compiler.disable`` as a
    decorator would load the compiler with the package.)
    """

    @functools.wraps(forward)
    def run(self: QuantizedModule, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            recipe = self._traced_recipe()
            if recipe in (context.NO_REGION, context.HIGH_PRECISION) or (
                recipe != context.UNTRACEABLE and self.is_traceable
            ):
                return forward(self, *args, **options)
            if not torch.compiler.is_dynamo_compiling():  # torch.export without torch.compile
                raise UnsupportedError(
                    f"torch.export cannot hold what a layer does under zerocast.autocast with a "
                    f"recipe that remembers something between casts, nor layers other than "
                    f"zerocast.nn.Linear, got {self.name or type(self).__name__}; export the model "
                    f"outside of the region."
                )
            torch._dynamo.graph_break(
                msg="under zerocast.autocast only layers of the type zerocast.nn.Linear, not "
                "tensor-parallel, and recipes that remember nothing between casts, are traced"
            )
            return torch.compiler.disable(run)(self, *args, **options)
        with as_in_first_run(self):
            return forward(self, *args, **options)

    return cast("Forward", run)


def _traced(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: str
) -> torch.Tensor:
    leading = input.shape[:-1]
    input, bias, dtype = _cast(input, weight, bias)
    _check_dtype(input, dtype)
    rows = input.reshape(-1, input.shape[-1])
    out = traced_linear(rows, weight, bias, recipe)
    return torch.ops.aten._unsafe_view(out, (*leading, weight.shape[0]))


def _check_dtype(input: torch.Tensor, dtype: torch.dtype) -> None:
    if input.dtype != dtype:
        raise InputError(
            f"input and weight of a layer must have one dtype, got {input.dtype} and {dtype}; "
            f"convert the input, or use torch.autocast."
        )


def _cast(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.dtype]:
    """Input and bias in the dtype that ``torch.autocast`` asks for, and that dtype, or the
    weight's.
    """
    device = input.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return input, bias, weight.dtype
    dtype = torch.get_autocast_dtype(device)
    return input.to(dtype), None if bias is None else bias.to(dtype), dtype


def _prepare(weight: QuantizedTensor) -> None:
    """Rebuild stale copies of a weight, or refuse it, as its plan says."""
    weight.quantized_storage.prepare_for_forward(lambda storage: rebuild_derived([storage]))


def _check_shapes(
    quantizers: GemmQuantizers, input: torch.Tensor, weight: torch.Tensor, part: Part | None
) -> None:
    """Raise where a tensor that forward or backward will quantize is not one that it can hold.

    Of the gradient, too: the backward would be too late. Of the other parts of a weight, too: their
    ranks wait for this one.
    """
    rows = input.numel() // input.shape[-1] if input.shape[-1] else 1
    shapes = [tuple(weight.shape)]
    if part is not None:
        shapes = list(dict.fromkeys(tuple(each.shape) for each in all_parts(part)))
        if not isinstance(weight, QuantizedTensor):
            check_cuts("the layer's weight", part, quantizers.weight.recipe)
    wanted: list[tuple[str, Recipe, tuple[int, ...]]] = []
    for shape in shapes:
        if not isinstance(input, QuantizedTensor):
            wanted.append(("input", quantizers.input.recipe, (rows, shape[1])))
        if not isinstance(weight, QuantizedTensor) and part is None:
            wanted.append(("weight", quantizers.weight.recipe, shape))
        if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
            wanted.append(
                ("gradient of the output", quantizers.grad_output.recipe, (rows, shape[0]))
            )
    for what, recipe, shape in wanted:
        _require_holds(recipe, shape, what)


def _require_holds(recipe: Recipe, shape: tuple[int, ...], what: str) -> None:
    try:
        recipe.check_shape(shape)
    except InputError as error:
        raise InputError(
            f"the layer's {what} cannot be quantized: {error} Or run the layer under "
            f"zerocast.autocast(enabled=False)."
        ) from error


def _calibrate(
    quantizers: GemmQuantizers, input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> None:
    """Record what quantizing would record, the gradient of the output when it comes."""
    quantizers.input.calibrate(input.detach().reshape(-1, input.shape[-1]))
    if not isinstance(weight, QuantizedTensor):
        quantizers.weight.calibrate(weight.detach())
    if out.requires_grad:
        record: Callable[[torch.Tensor], None] = quantizers.grad_output.calibrate
        out.register_hook(lambda grad: record(grad.reshape(-1, grad.shape[-1])))
