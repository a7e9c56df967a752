"""Every public call with each of its arguments replaced by what it cannot use: it ends in an error
of zerocast's that says what is required, or does what can only have been meant; on ranks of which
one alone is wrong, on all of them.
"""

import contextlib
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import zerocast
from tests.support.claims import one_message
from tests.support.planned import unsharded
from tests.support.ranks import on_ranks
from tests.support.refusals import NUMEL, of_weights
from tests.support.same_bytes import assert_same_storage
from zerocast.comm import Communicator, RecordingCommunicator, SingleRank, run_in_process
from zerocast.errors import InputError, ZerocastError
from zerocast.nn.tensor_parallel import Float8ColwiseParallel, PrepareFloat8ModuleInput
from zerocast.optim import ZeroOptimizer

functional = zerocast.nn.functional
SHAPE = (32, 64)
MXFP8 = zerocast.MXFP8BlockScaling()


class Strange:
    """An object whose every question is answered by an exception that is none of zerocast's."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: object) -> Any:
        raise RuntimeError("no entries")

    def __iter__(self) -> Iterator[Any]:
        raise OSError("no iteration")

    def __index__(self) -> int:
        raise ValueError("no index")

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise ValueError("no memory")


def wrong_values() -> dict[str, Any]:
    """What an argument is replaced by, made anew for every call."""
    x = torch.ones(SHAPE, dtype=torch.float32)
    return {
        "None": None, "True": True, "5": 5, "0": 0, "-1": -1, "2**64": 2**64, "nan": float("nan"),
        "text": "x", "surrogate": "\ud800", "bytes": b"", "list": [], "dict": {}, "tuple": (5, -1),
        "list of None": [None], "object": object(), "class": torch.nn.Linear, "instance": int,
        "lambda": lambda: None, "lambda of any": lambda *_, **__: "x", "generator": iter(()),
        "huge shape": (2**40, 2**40), "dtype": torch.complex64, "device": torch.device("meta"),
        "module": torch.nn.Linear(3, 3), "FP64": x.double(), "BF16": x.bfloat16(), "bool": x > 0,
        "complex": x.to(torch.complex64), "int64": x.long(), "scalar": x[0, 0], "vector": x[0],
        "empty": x[:0], "strided": x.t(), "meta": x.to("meta"), "sparse": x.to_sparse(),
        "negative bit": torch._neg_view(x), "overlapping": x[:1].expand(SHAPE),
        "quantized": zerocast.quantize(x, zerocast.Float8CurrentScaling()),
        "strange": Strange(), "recipe": zerocast.NVFP4BlockScaling(),
        "params": zerocast.QParams(stochastic_rounding=True),
    }  # fmt: skip


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ones."""
    return torch.ones(shape or SHAPE, dtype=dtype)


def weight() -> zerocast.QuantizedTensor:
    """A weight in FP8."""
    return zerocast.quantize(x(), zerocast.Float8CurrentScaling())


def quantizer() -> zerocast.Quantizer:
    """A quantizer to FP8."""
    return zerocast.Quantizer(zerocast.Float8CurrentScaling())


def state() -> zerocast.RecipeState:
    """The state of a layer's forward."""
    return zerocast.RecipeState.create(zerocast.DelayedScaling(), "forward", 3)


def model() -> torch.nn.Module:
    """One layer."""
    return torch.nn.Sequential(torch.nn.Linear(64, 32))


def converted(weights: str = "quantized") -> torch.nn.Module:
    """One layer, in FP8."""
    made = model()
    zerocast.nn.convert(made, zerocast.Float8CurrentScaling(), weights=weights)
    return made


def optimizer() -> ZeroOptimizer:
    """Of one layer."""
    return ZeroOptimizer(converted().parameters())


Call = tuple[Callable[..., Any], dict[str, Any]]

CALLS: dict[str, Callable[[], Call]] = {
    "quantize": lambda: (zerocast.quantize, {"tensor": x(), "recipe": "nvfp4", "name": "w"}),
    "empty": lambda: (zerocast.empty, {"shape": SHAPE, "recipe": "nvfp4", "name": "w"}),
    "replace_raw_data": lambda: (
        zerocast.replace_raw_data, {"tensor": weight(), "new_raw_data": x(dtype=torch.uint8)},
    ),
    "Quantizer": lambda: (zerocast.Quantizer, {"recipe": "mxfp8"}),
    "Quantizer.make_empty": lambda: (quantizer().make_empty, {"shape": SHAPE}),
    "Quantizer.quantize": lambda: (quantizer().quantize, {"tensor": x()}),
    "Quantizer.set_usage": lambda: (quantizer().set_usage, {}),
    "RecipeState.create": lambda: (
        zerocast.RecipeState.create, {"recipe": "delayed", "mode": "forward", "num_quantizers": 3},
    ),
    "RecipeState.create, stochastic": lambda: (
        zerocast.RecipeState.create, {"recipe": "nvfp4", "mode": "backward", "name": "layer"},
    ),
    "RecipeState.load_state_dict": lambda: (
        state().load_state_dict, {"state_dict": state().state_dict()},
    ),
    **{kind.__name__: lambda kind=kind: (kind, {}) for kind in zerocast.recipes.RECIPES.values()},
    "Recipe.for_role": lambda: (zerocast.NVFP4BlockScaling().for_role, {"role": "input"}),
    "Recipe.check_shape": lambda: (zerocast.NVFP4BlockScaling().check_shape, {"shape": SHAPE}),
    "QParams": lambda: (zerocast.QParams, {}),
    "TensorParallelShard": lambda: (
        zerocast.TensorParallelShard,
        {"whole": torch.Size((64, 64)), "dim": 0, "start": 0, "size": 32, "comm": SingleRank()},
    ),
    "model_init": lambda: (zerocast.model_init, {"recipe": "mxfp8"}),
    "autocast": lambda: (zerocast.autocast, {"recipe": "delayed"}),
    "use_backend": lambda: (zerocast.use_backend, {"backend": "reference"}),
    "reduce_amaxes": lambda: (zerocast.reduce_amaxes, {}),
    "checkpoint_contexts": lambda: (zerocast.checkpoint_contexts, {}),
    "is_fp8_available": lambda: (zerocast.is_fp8_available, {}),
    "is_fp8_block_scaling_available": lambda: (zerocast.is_fp8_block_scaling_available, {}),
    "is_mxfp8_available": lambda: (zerocast.is_mxfp8_available, {}),
    "is_nvfp4_available": lambda: (zerocast.is_nvfp4_available, {}),
    "convert": lambda: (zerocast.nn.convert, {"model": model(), "recipe": "mxfp8"}),
    "convert, masters": lambda: (
        zerocast.nn.convert, {"model": model(), "recipe": "mxfp8", "weights": "master"},
    ),
    "explain": lambda: (zerocast.nn.explain, {"model": converted(), "recipe": "mxfp8"}),
    "statistics": lambda: (zerocast.nn.statistics, {"model": converted()}),
    "swizzle": lambda: (zerocast.nn.swizzle, {"scales": x(128, 4, dtype=torch.uint8)}),
    "unswizzle": lambda: (
        zerocast.nn.unswizzle, {"scales": x(512, dtype=torch.uint8), "shape": (128, 4)},
    ),
    "Linear": lambda: (
        zerocast.nn.Linear, {"in_features": 64, "out_features": 32, "recipe": "mxfp8"},
    ),
    "LayerNorm": lambda: (zerocast.nn.LayerNorm, {"normalized_shape": 64}),
    "RMSNorm": lambda: (zerocast.nn.RMSNorm, {"normalized_shape": 64}),
    "LayerNormLinear": lambda: (
        zerocast.nn.LayerNormLinear, {"in_features": 64, "out_features": 32, "recipe": "mxfp8"},
    ),
    "LayerNormMLP": lambda: (
        zerocast.nn.LayerNormMLP, {"hidden_size": 64, "ffn_hidden_size": 32, "recipe": "mxfp8"},
    ),
    "layernorm": lambda: (
        functional.layernorm,
        {"x": x(), "weight": x(64), "bias": x(64), "quantizer": quantizer()},
    ),
    "gelu": lambda: (functional.gelu, {"x": x(), "quantizer": quantizer(), "output": True}),
    "linear": lambda: (functional.linear, {"x": x(), "weight": weight(), "bias": x(32)}),
    "report": lambda: (zerocast.sharded.report, {"model": converted("master")}),
    "LowBitAllGather": lambda: (
        zerocast.sharded.LowBitAllGather, {"shape": SHAPE, "recipe": MXFP8, "name": "w"},
    ),
    "MasterWeight": lambda: (
        zerocast.sharded.MasterWeight,
        {"value": x(), "gather": zerocast.sharded.LowBitAllGather(SHAPE, MXFP8, "w")},
    ),
    "ZeroOptimizer": lambda: (
        ZeroOptimizer, {"params": list(converted().parameters()), "lr": 0.1},
    ),
    "ZeroOptimizer.load_state_dict": lambda: (
        optimizer().load_state_dict, {"state_dict": optimizer().state_dict()},
    ),
    "Float8ColwiseParallel": lambda: (Float8ColwiseParallel, {"input_layouts": Shard(0)}),
    "PrepareFloat8ModuleInput": lambda: (
        PrepareFloat8ModuleInput,
        {"input_layouts": Shard(0), "desired_input_layouts": Replicate()},
    ),
}  # fmt: skip
"""Of each call what is called and right arguments; those that are left out have their defaults."""


def arguments_of(call: Callable[..., Any], given: dict[str, Any]) -> set[str]:
    """All that the call can be given by name."""
    parameters = inspect.signature(call).parameters.values()
    return given.keys() | {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}


def use(made: Any) -> None:
    """What can be used when it was made: a region is entered, and a recipe casts."""
    if isinstance(made, zerocast.QParams):
        made = zerocast.NVFP4BlockScaling(fp4_quant_fwd_weight=made)
    if isinstance(made, zerocast.Recipe):
        zerocast.quantize(x(128, 128), made)
    elif isinstance(made, AbstractContextManager):
        with made:
            pass


def outcomes(name: str) -> dict[str, str]:
    """The foreign error that each replaced argument of a call ends in."""
    found = {}
    for argument in arguments_of(*CALLS[name]()):
        for kind, value in wrong_values().items():
            if argument in ("amax_compute_algo", "filter_fqns") and callable(value):
                continue  # it is called, and what it raises is its author's
            call, given = CALLS[name]()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    use(call(**given | {argument: value}))
            except ZerocastError:
                pass
            except Exception as error:
                text = str(error).splitlines()[0] if str(error) else ""
                found[f"{argument}={kind}"] = f"{type(error).__name__}: {text[:90]}"
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_ends_in_an_error_that_says_so(name: str) -> None:
    """Whatever one argument is replaced by, what is raised is an error of zerocast's."""
    call, given = CALLS[name]()
    use(call(**given))
    found = outcomes(name)
    assert not found, "\n".join(f"{where}: {error}" for where, error in found.items())


# --- on ranks, of which the last one alone is wrong ---

RECIPES = (zerocast.NVFP4BlockScaling(), MXFP8)


def lists_and_scalars() -> list[Any]:
    """What arguments are replaced by that lists are taken for: of no use anywhere, or elsewhere."""
    return [
        None, 0, -1, 1.5, 2**70, "ab", "\ud800", b"ab", [], [[]], {}, {0: 1, 1: 2}, set(), object(),
        Strange(), iter([1, 2]), range(2), [None, None], [1, 1], ["a", "b"], ["a", "a"], [1.5, 0],
        ["\ud800", "b"], [Strange(), Strange()], [object(), None], [torch.ones(3), torch.ones(5)],
        [torch.ones(NUMEL // 3, dtype=torch.float64)] * 2, torch.ones(2), torch.ones(2, 2),
        torch.zeros(2, dtype=torch.int64), True, [True, False], [(None, None)] * 2, NotImplemented,
        [torch.zeros(0, dtype=torch.uint8)] * 2, [2**70, 0], lambda: None, zerocast, type,
        [["*"]], [["*.a"], ["*.b"]], [7], [[7]],
    ]  # fmt: skip


ARGUMENTS = (
    "model_weights", "master_weights", "start_offsets", "fsdp_shard_model_weights",
    "manual_post_all_gather_processing", "check_finite",
)  # fmt: skip
PLAN_ARGUMENTS = (*ARGUMENTS, "names", "amax_groups")


def right(comm: Communicator) -> dict[str, Any]:
    """A right call, of two weights, cut over the ranks."""
    return of_weights(comm, *RECIPES)


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What an error of zerocast said, if the call ended in one."""
    try:
        call(*args, **kwargs)
    except ZerocastError as error:
        return str(error)
    return ""


@on_ranks("in_process")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("call", "argument"),
    [(zerocast.CastPlan, argument) for argument in PLAN_ARGUMENTS]
    + [(zerocast.quantize_master_weights, argument) for argument in ARGUMENTS],
)
def test_any_value_of_any_argument(
    comm: Communicator, call: Callable[..., Any], argument: str
) -> None:
    """Right or refused, by the same error on every rank; the group is as usable as before."""
    for value in lists_and_scalars():
        kwargs = right(comm)
        if comm.rank == comm.size - 1:
            kwargs[argument] = value
        one_message(comm.all_gather_object(error_of(call, **kwargs)))


@on_ranks("in_process")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("call", ["cast", "bind"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_any_value_as_new_masters(comm: Communicator, call: str) -> None:
    """The same of masters that a plan is given later; it goes on afterwards."""
    kwargs = right(comm)
    plan = zerocast.CastPlan(**kwargs)
    for value in lists_and_scalars():
        wrong = value if comm.rank == comm.size - 1 else kwargs["master_weights"]
        one_message(comm.all_gather_object(error_of(getattr(plan, call), wrong)))
    plan.cast(kwargs["master_weights"])
    plan.all_gather()
    for held in kwargs["model_weights"]:
        assert_same_storage(held, unsharded(torch.ones(held.shape), held.recipe), "afterwards")


@pytest.mark.parametrize("value", lists_and_scalars(), ids=lambda value: type(value).__name__)
def test_any_value_that_is_processed(value: Any) -> None:
    """post_all_gather_processing and the plan's hook refuse what is no tensor or no module."""
    kwargs = right(SingleRank())
    for call in (
        zerocast.post_all_gather_processing,
        zerocast.CastPlan(**kwargs).post_all_gather_hook,
    ):
        with contextlib.suppress(ZerocastError):
            call(value)


NO_BUFFERS = [None, 1.5, "text", [], object(), torch.ones(4).to_sparse(), torch.zeros(4, 4).t()]
COLLECTIVES = {
    "all_reduce_max_": lambda comm, x: comm.all_reduce_max_(x),
    "all_reduce_sum_": lambda comm, x: comm.all_reduce_sum_(x),
    "all_gather_": lambda comm, x: comm.all_gather_(x),
    "start_all_gather_": lambda comm, x: comm.start_all_gather_(x)(),
    "counts": lambda comm, x: comm.all_gather_(torch.zeros(6), x if x is not None else 5),
    "reduce_scatter_sum": lambda comm, x: comm.reduce_scatter_sum(x, x),
    "start_all_to_all": lambda comm, x: comm.start_all_to_all(x, x)(),
    "received": lambda comm, x: comm.start_all_to_all(
        torch.zeros(6), torch.zeros(6), x if x is not None else 5
    ),
    "broadcast_": lambda comm, x: comm.broadcast_(x),
    "root": lambda comm, x: comm.broadcast_(torch.zeros(2), x),
    "all_gather_object": lambda comm, x: comm.all_gather_object(threading.Lock()),
    "recorded": lambda comm, x: RecordingCommunicator(comm).all_gather_(x),
    "recorded sum": lambda comm, x: RecordingCommunicator(comm).all_reduce_sum_(x),
    "recorded exchange": lambda comm, x: RecordingCommunicator(comm).start_all_to_all(x, x),
    "recorded scatter": lambda comm, x: RecordingCommunicator(comm).reduce_scatter_sum(x, x),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("call", COLLECTIVES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_wrong_arguments_of_collectives(call, world_size):
    """Whatever the last rank gives: it is refused, and the others are released."""

    def body(comm, wrong):
        if comm.rank == world_size - 1:
            with pytest.raises(ZerocastError):
                COLLECTIVES[call](comm, wrong)
            with pytest.raises(ZerocastError):
                COLLECTIVES[call](SingleRank(), wrong)
            raise InputError("as it was")
        comm.barrier()

    for wrong in NO_BUFFERS:
        with pytest.raises(InputError, match="as it was"):
            run_in_process(world_size, lambda comm, wrong=wrong: body(comm, wrong))
