"""Hugging Face's Llama under FSDP2, with codes in its gathers: nothing of it is changed."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import zerocast
from tests.sharded.sharded import (
    BF16,
    assert_converted_casts,
    everything,
    gathered,
    gradients,
    reshard,
    whole_masters,
)
from tests.support.claims import assert_same_tensors, stored
from tests.support.llama import HIDDEN_96, TIED_160, checkpoint_activations, llama, tokens
from tests.support.ranks import on_gloo, run_ranks, shared_folder
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_bytes

pytestmark = pytest.mark.mpi(min_size=4)

NVFP4, DELAYED = RECIPES["nvfp4"], RECIPES["delayed"]
PROJECTIONS = 14
"""Layers that are converted: seven in each of two blocks."""


def sharded(model, recipe):
    """Converted but for the head, and sharded block by block."""
    report = zerocast.nn.convert(model, recipe, weights="master", filter_fqns=["lm_head"])
    assert len(report.converted) == PROJECTIONS
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=BF16)
    return fully_shard(model, mp_policy=BF16)


def adamw(model) -> torch.optim.Optimizer:
    """torch's, by its foreach implementation."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)


def state_of(model, optimizer) -> dict[str, dict]:
    """By the names under which set_state_dict takes it."""
    masters, moments = get_state_dict(model, optimizer)
    return {"model_state_dict": masters, "optim_state_dict": moments}


def train(model, optimizer, start, end) -> list[float]:
    """Steps ``start`` to ``end``; their losses."""
    losses = []
    for step in range(start, end):
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        zerocast.sharded.precompute_scales_for_fsdp(model)
        losses.append(loss.item())
    return losses


def gathered_codes(model) -> dict[str, zerocast.QuantizedTensor]:
    """A copy of every weight that is gathered in codes. Collective."""
    codes = {
        name: weight.detach().clone()
        for name, weight in gathered(model).items()
        if isinstance(weight, zerocast.QuantizedTensor)
    }
    reshard(model)
    assert len(codes) == PROJECTIONS
    return codes


@pytest.mark.parametrize(
    ("options", "recipe", "steps", "saved_on", "resumed_on"),
    [
        pytest.param(HIDDEN_96, NVFP4, 20, 4, 2, id="nvfp4"),
        pytest.param(TIED_160, DELAYED, 4, 2, 4, id="tied-delayed", marks=pytest.mark.slow),
    ],
)
def test_a_trained_llama_is_resumed(options, recipe, steps, saved_on, resumed_on):
    """Training lowers the loss and gathers the unsharded cast. Masters and the state of AdamW,
    saved by torch.distributed.checkpoint, go on as the run that was not interrupted, bit for bit,
    on another number of ranks. (All ranks have the same batch, of whose gradients the mean over 2
    and over 4 is exact.)
    """

    def save(comm):
        model = sharded(llama(options), recipe)
        optimizer = adamw(model)
        losses = train(model, optimizer, 0, steps)
        assert max(losses[-2:]) < min(losses[:2])
        if not recipe.state:
            assert_converted_casts(model, recipe, PROJECTIONS)
        folder = shared_folder(comm)
        dcp.save(state_of(model, optimizer), checkpoint_id=folder)
        at_once = everything(model)
        return folder, at_once, train(model, optimizer, steps, steps + 2), everything(model)

    folder, at_once, losses, later = run_ranks("torch_distributed", saved_on, save)[0]

    def resume(comm):
        model = sharded(llama(options, seed=1), recipe)
        optimizer = adamw(model)
        saved = state_of(model, optimizer)
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(model, optimizer, **saved)
        assert_same_tensors(everything(model), at_once, "at once")
        assert train(model, optimizer, steps, steps + 2) == losses
        assert_same_tensors(everything(model), later, "after 2 steps")

    run_ranks("torch_distributed", resumed_on, resume)


@pytest.mark.slow
def test_a_gathered_llama_is_a_pretrained_one():
    """save_pretrained of the gathered state dict makes a plain model of the masters; converted and
    sharded again on other ranks it gathers the same codes. Sharded, its logits and what it
    generates are those of a plain model of the decoded weights.
    """
    from transformers import LlamaForCausalLM

    def save(comm):
        model = sharded(llama(HIDDEN_96), NVFP4)
        optimizer = adamw(model)
        train(model, optimizer, 0, 2)
        folder = shared_folder(comm)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if comm.rank == 0:
            model.save_pretrained(folder, state_dict=state)
        return folder, whole_masters(model), gathered_codes(model), *inference(model)

    def inference(model):
        model.eval()
        with torch.inference_mode():
            logits = model(input_ids=tokens(50)).logits
        return logits, model.generate(tokens(50)[:1, :5], max_new_tokens=6, do_sample=False)

    folder, masters, codes, *inferred = run_ranks("torch_distributed", 3, save)[0]

    plain = LlamaForCausalLM.from_pretrained(folder)
    assert not any(isinstance(module, zerocast.nn.Linear) for module in plain.modules())
    assert_same_tensors(dict(plain.state_dict()), masters, "of the pretrained model")

    def again(comm):
        model = sharded(LlamaForCausalLM.from_pretrained(folder), NVFP4)
        assert_same_tensors(stored(gathered_codes(model)), stored(codes))

    run_ranks("torch_distributed", 2, again)

    for name, parameter in plain.named_parameters():
        weight = codes[name].dequantize() if name in codes else parameter.detach()
        parameter.data = weight.bfloat16()
    for value, expected in zip(inferred, inference(plain), strict=True):
        assert_same_bytes(value, expected, "inferred")


@on_gloo(2)
@pytest.mark.slow
def test_checkpointed_blocks_quantize_alike(comm):
    """Under autocast, with transformers' own activation checkpointing and
    zerocast.checkpoint_contexts, the loss and all gradients are those without it, bit for bit.
    """
    results = []
    for checkpoints in (False, True):
        model = sharded(llama(HIDDEN_96), NVFP4)
        if checkpoints:
            checkpoint_activations(model)
        with zerocast.autocast(recipe=DELAYED):
            loss = model(input_ids=tokens(0), labels=tokens(0)).loss
        loss.backward()
        results.append({"loss": loss.detach()} | gradients(model))
    assert_same_tensors(results[1], results[0], "with checkpoints")
