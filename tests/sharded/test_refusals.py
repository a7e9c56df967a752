"""What is refused: on every rank, with one message, at once."""

import functools

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import zerocast
from tests.sharded.sharded import K, bank, batch, converted
from tests.support.claims import message_of, one_message
from tests.support.models import Bank
from tests.support.ranks import on_gloo
from tests.support.recipes import RECIPES, VARIANTS, each
from zerocast.errors import InputError, UnsupportedError

NVFP4 = RECIPES["nvfp4"]


@on_gloo(4)
def test_sharding_by_columns_is_refused_when_the_model_is_wrapped(comm):
    """A placement that shards columns is refused by fully_shard, before anything has travelled."""
    model = converted(NVFP4, (48,))
    assert message_of(
        UnsupportedError, fully_shard, model, shard_placement_fn=lambda parameter: Shard(1)
    ) == (
        "layers.0.weight: a low-bit all-gather needs masters sharded by rows, got a split of "
        "dimension 1; leave shard_placement_fn out for this parameter, or leave its layer out of "
        "zerocast.nn.convert by filter_fqns or include."
    )


NOT_GATHERED = (
    "layers.0 was to be all-gathered in codes before its layer runs, and FSDP2 has not gathered "
    "it; call torch.distributed.fsdp.fully_shard on the layer or a module around it, without the "
    "parameter among ignored_params, and run it by that module's forward. accelerate's FSDP2 "
    "plugin, also under transformers' Trainer, does that for several processes with accelerators "
    "only, and nothing on CPUs or in one process. (For a model that is not sharded, convert with "
    "weights='quantized' or 'high_precision'.)"
)


def test_a_layer_that_is_not_sharded_is_refused():
    """A converted model that fully_shard was not called on does not run in high precision."""
    model = converted(NVFP4, (48,))
    assert message_of(UnsupportedError, model, torch.randn(4, K)) == NOT_GATHERED


@on_gloo(2)
def test_ignored_parameters_and_bypassed_hooks_are_refused(comm):
    """A parameter that fully_shard ignores, a layer whose module's forward did not run, and one
    that DistributedDataParallel wraps would be high precision: an error on every rank.
    """
    model = converted(NVFP4, (48,))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    replicated = message_of(UnsupportedError, wrapped, batch())
    fully_shard(model, ignored_params=set(model.parameters()))
    bypassed = bank(NVFP4, (48,), wrap_layers=False).layers[0]
    others = [message_of(UnsupportedError, each, batch()) for each in (model, bypassed)]
    assert one_message([replicated, *others]) == NOT_GATHERED


@on_gloo(4)
@each("nvfp4", "current", "mxfp8")
def test_resharding_to_fewer_ranks_is_refused_by_the_first_gather(comm, recipe):
    """An integer for reshard_after_forward, which torch's FSDP2 does not do for weights that are
    gathered in other bytes than their own, is refused in the first forward; True, set instead, is
    carried out by the next.
    """
    model = bank(recipe, (48, 1), wrap_layers=False, reshard_after_forward=2)
    message = message_of(UnsupportedError, model, batch())
    if hasattr(model, "reset_iter_state"):  # torch 2.11 goes on after no forward that failed
        model.reset_iter_state()
        model.set_reshard_after_forward(True)
        model(batch()).backward()
    assert message == (
        "layers.0.weight: reshard_after_forward must be True or False for a weight that FSDP2 "
        "all-gathers in codes, got an int, which keeps the rows of several ranks after a forward; "
        "give fully_shard True or False."
    )


@on_gloo(2)
def test_masters_that_every_rank_holds_whole_are_refused_by_the_first_gather(comm):
    """torch's replicate shards nothing, so there would be nothing to gather in codes."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = converted(NVFP4, (48,))
    replicate(model)
    assert message_of(UnsupportedError, model, batch()) == (
        "layers.0.weight: a low-bit all-gather needs a master that FSDP2 shards over the ranks, "
        "got one that every rank holds whole; call torch.distributed.fsdp.fully_shard, or convert "
        "with weights='quantized' or 'high_precision'."
    )


@on_gloo(2)
def test_a_policy_of_another_dtype_is_refused_by_the_first_gather(comm):
    """A weight of codes cannot present every dtype that a policy may name."""
    model = bank(NVFP4, (48,), policy=MixedPrecisionPolicy(param_dtype=torch.float64))
    assert message_of(UnsupportedError, model, batch()) == (
        "layers.0.weight: a weight that is all-gathered in codes presents FP32, BF16 or FP16, got "
        "torch.float64; give fully_shard a MixedPrecisionPolicy with such a param_dtype."
    )


HOLDS_CODES = (
    "fully_shard would decode a weight that holds codes, gather it in high precision and train it "
    "from rounded values; before fully_shard, make the layers outside of zerocast.model_init and "
    "call zerocast.nn.convert(model, recipe, weights='master'). Weights that hold codes are "
    "trained by zerocast.optim.ZeroOptimizer."
)


@on_gloo(2)
def test_weights_that_hold_codes_are_refused_when_the_model_is_wrapped(comm):
    """fully_shard refuses every parameter that holds codes, of a converted layer, of one made under
    model_init and of a module of one's own, also under a default device; for other memory of its
    kind such a weight can be asked as ever.
    """
    own, another = torch.nn.Module(), torch.nn.Module()
    weight = torch.nn.Parameter(zerocast.quantize(torch.randn(48, K), NVFP4))
    own.weight = another.weight = weight
    model = converted(NVFP4, (48,), weights="quantized")
    with zerocast.model_init(recipe=NVFP4):
        made = zerocast.nn.LayerNormMLP(K, 48)

    messages = [message_of(UnsupportedError, fully_shard, each) for each in (own, model, made)]
    with torch.device("cpu"):
        messages.append(message_of(UnsupportedError, fully_shard, another))
    assert weight.new_zeros(48, K).shape == (48, K)
    assert one_message(messages) == HOLDS_CODES


@on_gloo(2)
def test_a_model_that_is_sharded_already_is_not_converted(comm):
    """To leave its layers as they are would be a gather in high precision where codes were asked
    for: convert refuses, unless told to leave them out, or to gather in high precision.
    """
    model = fully_shard(Bank((48, 5)))
    convert = functools.partial(zerocast.nn.convert, model, NVFP4, weights="master")
    assert set(convert(filter_fqns=["layers"]).left) == {"layers.0", "layers.1"}
    assert set(convert(low_bit_all_gather=False).left) == {"layers.0", "layers.1"}
    assert message_of(InputError, convert) == (
        "weights='master' needs layers whose weights are not sharded, got layers.0, whose weight "
        "is sharded; call zerocast.nn.convert before fully_shard or parallelize_module, or leave "
        "the layer out by filter_fqns or include."
    )
    assert type(model.layers[0]) is torch.nn.Linear
    left = zerocast.nn.convert(bank(NVFP4, (48,)), NVFP4, weights="master").left
    assert left == {"layers.0": "it is gathered in codes already"}


def test_a_product_with_a_master_is_refused():
    """Whoever multiplies with a master himself is told that it was to be gathered."""
    model = converted(NVFP4, (48,))
    linear, weight = torch.nn.functional.linear, model.layers[0].weight
    message = message_of(UnsupportedError, linear, torch.randn(4, K), weight)
    assert message == NOT_GATHERED.replace("layers.0 was", "layers.0.weight was")


def test_precompute_needs_low_bit_gathers():
    """A model without a parameter that is gathered in codes is refused, not passed over."""
    precompute = zerocast.sharded.precompute_scales_for_fsdp
    assert message_of(InputError, precompute, Bank((48,))) == (
        "precompute_scales_for_fsdp needs a model with parameters that FSDP2 all-gathers in codes, "
        "got one with none; convert it by zerocast.nn.convert(model, recipe, weights='master'), "
        "then call torch.distributed.fsdp.fully_shard."
    )


def test_a_recipe_that_casts_the_transpose_is_taken_where_nothing_is_cast_ahead():
    """Gathered in high precision, weights are quantized by the forward, from the whole."""
    model = converted(VARIANTS["nvfp4-1x16"], (48,), low_bit_all_gather=False)
    assert type(model.layers[0]) is zerocast.nn.Linear
