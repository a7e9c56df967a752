"""A file of a quantized weight is a door: what is damaged or crafted does not get past loading."""

import copy
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.same_bytes import assert_same_storage
from tests.support.weights import EVERY_RECIPE, every_recipe, through_a_file
from zerocast.comm import SingleRank
from zerocast.errors import InputError
from zerocast.recipes import DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling, QParams, Recipe
from zerocast.tensors import QuantizedTensor, TensorParallelShard, empty, quantize
from zerocast.tensors.quantized_tensor import restore
from zerocast.tensors.saved_storage import reduce_storage, restore_storage

FIELDS = ["shape", "dtype", "recipe", "buffers", "rebuild_on_use", "amax_group", "part"]
NVFP4 = EVERY_RECIPE["nvfp4"]


def fields(of: Recipe = NVFP4, /, **changes: Any) -> list[Any]:
    """What a weight [32, 64] is saved as, some of it changed."""
    weight = quantize(torch.linspace(-1, 1, 2048).view(32, 64), of, name="w")
    saved = reduce_storage(weight.quantized_storage)[1]
    return list((dict(zip(FIELDS, saved, strict=True)) | changes).values())


def bypassing(recipe: Any, **changes: Any) -> Any:
    """As unpickling makes it: nobody looks at the fields."""
    changed = copy.copy(recipe)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return changed


@every_recipe
def test_a_weight_as_it_was_saved_is_accepted(recipe):
    """Whole, without its columnwise copy, without its rowwise one, as a part, and empty."""
    value = torch.linspace(-1, 1, 2048).view(32, 64)
    weights = [quantize(value, recipe), quantize(value, recipe, columnwise=False)]
    for rowwise, columnwise in ((True, False), (False, True)):
        weights.append(quantize(value, recipe))
        weights[-1].update_usage(rowwise_usage=rowwise, columnwise_usage=columnwise)
    weights.append(
        empty((32, 64), recipe, tp_shard=TensorParallelShard((32, 64), 0, 0, 32, SingleRank()))
    )
    weights.append(
        empty((0, 64), recipe, tp_shard=TensorParallelShard((32, 64), 0, 32, 0, SingleRank()))
    )
    for weight in weights:
        assert_same_storage(through_a_file(torch.nn.Parameter(weight)), weight, "loaded")


def other_buffer(change: Callable[[torch.Tensor], torch.Tensor], name: str) -> dict[str, Any]:
    """The buffers of a weight, one of them changed."""
    buffers = fields()[3]
    return {"buffers": buffers | {name: change(buffers[name])}}


def without(name: str) -> dict[str, Any]:
    """The buffers of a weight but one."""
    return {"buffers": {key: b for key, b in fields()[3].items() if key != name}}


CODES, SCALES = "rowwise_data", "rowwise_scale_inv"
BUFFERS = fields()[3]
DAMAGED: dict[str, dict[str, Any]] = {
    "another shape of as many elements": {"shape": (16, 4096)},
    "a shape that is much larger": {"shape": (100_000, 4096)},
    "one that overflows": {"shape": (2**40, 2**40)},
    "a negative size": {"shape": (-32, 64)},
    "no shape": {"shape": None},
    "sizes that are no integers": {"shape": (32.0, 64)},
    "a shape that the recipe cannot hold": {"shape": (32, 65)},
    "another dtype": {"dtype": torch.float64},
    "no dtype": {"dtype": "bfloat16"},
    "another recipe": {"recipe": MXFP8BlockScaling()},
    "no recipe": {"recipe": NVFP4BlockScaling},
    "a recipe with another history": {"recipe": DelayedScaling()},
    "a seed out of range": {"recipe": bypassing(NVFP4, seed=2**70)},
    "a scope that is none": {"recipe": bypassing(NVFP4, nvfp4_4over6="some")},
    "QParams of another kind": {"recipe": bypassing(NVFP4, fp4_quant_fwd_weight=None)},
    "QParams out of range": {
        "recipe": bypassing(
            NVFP4, fp4_quant_fwd_weight=bypassing(QParams(), amax_epsilon=float("nan"))
        )
    },
    "shorter codes": other_buffer(lambda b: b[:-1], CODES),
    "longer codes": other_buffer(lambda b: torch.cat([b, b]), CODES),
    "codes in another shape": other_buffer(lambda b: b.view(64, 16), CODES),
    "codes of another dtype": other_buffer(lambda b: b.view(torch.int8), CODES),
    "wider codes": other_buffer(lambda b: b.to(torch.int32), CODES),
    "strided codes": other_buffer(lambda b: b.t().contiguous().t(), CODES),
    "expanded codes": other_buffer(lambda b: b[:1].expand(b.shape), CODES),
    "a short scale": other_buffer(lambda b: b[:1], SCALES),
    "scales of another dtype": other_buffer(lambda b: b.float(), SCALES),
    "codes on another device": other_buffer(lambda b: b.to("meta"), CODES),
    "sparse codes": other_buffer(lambda b: b.to_sparse(), CODES),
    "a quantized amax": other_buffer(
        lambda b: quantize(torch.ones(1), EVERY_RECIPE["current"]), "amax"
    ),
    "no tensor": other_buffer(lambda b: b.tolist(), CODES),
    "no codes": without(CODES),
    "no scales": without(SCALES),
    "no amax": without("amax"),
    "half of a columnwise copy": without("columnwise_data"),
    "no buffers": {"buffers": {}},
    "no dictionary": {"buffers": None},
    "a buffer more": {"buffers": fields()[3] | {"scale": torch.ones(1)}},
    "buffers in one place": {"buffers": BUFFERS | {"columnwise_data": BUFFERS[CODES].view(64, 16)}},
    "staleness that is none": {"rebuild_on_use": "yes"},
    "a group that is no text": {"amax_group": 3},
    "no part": {"part": (32, 64)},
    "a part of another shape": {"part": TensorParallelShard((64, 64), 0, 0, 16, None)},
    "a part outside of its whole": {
        "part": bypassing(TensorParallelShard((32, 64), 0, 0, 32, None), start=16, size=32)
    },
    "a part of another kind": {
        "part": bypassing(TensorParallelShard((32, 64), 0, 0, 32, None), dim="0")
    },
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_a_weight_cannot_be_made_of_is_refused(name):
    """By InputError, before anything reads it."""
    with pytest.raises(InputError):
        restore_storage(*fields(**DAMAGED[name]))


def test_a_recipe_is_made_anew():
    """What was cached beside its fields in the file is not trusted."""
    crafted = bypassing(NVFP4, remembers=True, unknown=1)
    assert "remembers" in vars(crafted)
    loaded = restore_storage(*fields(recipe=crafted)).recipe
    assert loaded == NVFP4
    assert vars(loaded).keys() == {field.name for field in dataclasses.fields(NVFP4)}


def test_no_storage_is_no_weight():
    """The function that unpickling calls for the tensor checks what it is given, too."""
    with pytest.raises(InputError, match="needs a QuantizedStorage, got list"):
        restore([1], False, True)


def test_a_compiled_graph_gives_whole_weights_only():
    """__tensor_unflatten__ compares what it is given with the recipe."""
    weight = quantize(torch.randn(32, 64), NVFP4)
    names, context = weight.__tensor_flatten__()
    inner = {name: getattr(weight, name) for name in names}
    again = QuantizedTensor.__tensor_unflatten__(inner, context, (32, 64), (64, 1))
    assert_same_storage(again, weight, "unflattened")
    for size in ((64, 64), (32, 128)):
        with pytest.raises(InputError):
            QuantizedTensor.__tensor_unflatten__(inner, context, size, (64, 1))


FUZZ = """
import io, random, sys, torch
from tests.support.weights import EVERY_RECIPE
from zerocast.errors import ZerocastError
from zerocast.tensors import quantize, quantize_into

random.seed(0)
accepted = refused = 0
for recipe in EVERY_RECIPE.values():
    file = io.BytesIO()
    torch.save(quantize(torch.linspace(-1, 1, 2048).view(32, 64), recipe), file)
    whole = file.getvalue()
    end = whole.index(b"data/0") if b"data/0" in whole else len(whole)
    for _ in range(int(sys.argv[1])):
        damaged = bytearray(whole)
        for _ in range(random.randint(1, 3)):
            damaged[random.randrange(end)] = random.randrange(256)
        try:
            weight = torch.load(io.BytesIO(bytes(damaged)), weights_only=True)
            if not hasattr(weight, "quantized_storage"):
                refused += 1
                continue
        except Exception:
            refused += 1
            continue
        accepted += 1
        storage = weight.quantized_storage
        assert storage.shape == (32, 64), storage.shape
        weight.dequantize()
        if storage.tp_shard is None:
            quantize_into(storage, torch.ones(32, 64))
            weight.dequantize()
print(accepted, refused)
"""


def test_damaged_files_never_crash():
    """Files with bytes changed are refused, or hold a whole weight that can be decoded and cast."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FUZZ, "15"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    accepted, refused = map(int, done.stdout.split())
    assert accepted + refused == 15 * len(EVERY_RECIPE)
    assert refused
