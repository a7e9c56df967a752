"""Hugging Face's Llama on quantized weights, trained by ZeroOptimizer."""

import tempfile

import pytest
import torch

import zerocast
from tests.support.llama import TIED_160, checkpoint_activations, llama, tokens
from tests.support.ranks import run_ranks
from tests.support.same_bytes import assert_same_bytes, assert_same_storage

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.slow]

RECIPE = zerocast.NVFP4BlockScaling()


def converted(model):
    """With quantized weights but for the head, which is the embedding."""
    report = zerocast.nn.convert(model, RECIPE)
    assert list(report.left) == ["lm_head"]
    return model


def test_gathered_masters_make_a_pretrained_model():
    """A few steps under autocast on 2 ranks, with transformers' activation checkpointing, lower the
    loss. The masters are saved by save_pretrained; from_pretrained and convert make the codes of
    the trained model of them again.
    """
    from transformers import LlamaForCausalLM

    def run(comm):
        model = converted(llama(TIED_160))
        checkpoint_activations(model)
        optimizer = zerocast.optim.ZeroOptimizer(
            model.parameters(), torch.optim.AdamW, lr=3e-3, group=comm, overlap_all_gather=True
        )
        losses = []
        for step in range(4):
            with zerocast.autocast(recipe=zerocast.Float8CurrentScaling()):
                loss = model(input_ids=tokens(step), labels=tokens(step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert max(losses[-2:]) < min(losses[:2])
        masters = {name: optimizer.gather_master(p) for name, p in model.named_parameters()}
        return masters, {name: p.detach() for name, p in model.named_parameters()}

    masters, trained = run_ranks("mpi", 2, run)[0]

    with tempfile.TemporaryDirectory() as folder:
        llama(TIED_160).save_pretrained(folder, state_dict=dict(masters))
        plain = LlamaForCausalLM.from_pretrained(folder)
    for name, parameter in plain.named_parameters():
        assert_same_bytes(parameter, masters[name], name)
    for name, weight in converted(plain).named_parameters():
        quantized = isinstance(weight, zerocast.QuantizedTensor)
        same = assert_same_storage if quantized else assert_same_bytes
        same(weight, trained[name], name)
