"""vLLM on this process's CPU serves a small Llama of transformers, which is trained beside it and
sent to it: whole, by a weight source, and then what changed. Argument: an empty directory.
"""

import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed.weight_transfer.base import WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine
from vllm.model_executor.models.llama import LlamaForCausalLM as ServedLlama

import zerocast
from zerocast.adapters.refit.vllm import codes_source
from zerocast.refit import Receiver, Refit

DIALECT = "compressed-tensors/fp8-channel"
TOKENS = torch.randint(3, 256, (4, 32), generator=torch.Generator().manual_seed(0))


def served(llm: LLM) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The log probabilities that it gives the tokens, and copies of what it holds."""
    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": row} for row in TOKENS.tolist()]
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = llm.generate(prompts, sampling, use_tqdm=False)
    probabilities = torch.tensor([
        [given.prompt_logprobs[i][row[i]].logprob for i in range(1, len(row))]
        for given, row in zip(found, TOKENS.tolist(), strict=True)
    ])  # fmt: skip
    [held] = llm.apply_model(lambda m: {n: p.detach().clone() for n, p in m.named_parameters()})
    return probabilities, held


def trained(refit: Refit) -> torch.Tensor:
    """The log probabilities under what is sent, by transformers in FP32."""
    sent = zerocast.export.decode_tensors(dict(refit.named_tensors()), DIALECT)
    model = LlamaForCausalLM(CONFIG)
    model.load_state_dict({
        name: t.dequantize() if isinstance(t, zerocast.QuantizedTensor) else t
        for name, t in sent.items()
    })  # fmt: skip
    with torch.no_grad():
        given = model(input_ids=TOKENS).logits.log_softmax(-1)[:, :-1]
    return given.gather(2, TOKENS[:, 1:, None])[..., 0]


def load(llm: LLM, tensors) -> None:
    """As the guide says."""
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})


def step(*changed: str) -> None:
    """Of training, of the parameters whose names contain one of ``changed``; of all if none is."""
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    for name, param in model.named_parameters():
        if changed and not any(each in name for each in changed):
            param.grad.zero_()
    optimizer.step()
    optimizer.zero_grad()


CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=128,
)  # fmt: skip
torch.manual_seed(0)
model = LlamaForCausalLM(CONFIG).bfloat16()
zerocast.nn.convert(model, "nvfp4", filter_fqns=["lm_head"])
optimizer = zerocast.optim.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.5)
options = {"optimizer": optimizer, "from_masters": True}
zerocast.export.save_pretrained(model, sys.argv[1], dialect=DIALECT, **options)
llm = LLM(
    sys.argv[1], enforce_eager=True, max_model_len=64, dtype="bfloat16", max_num_seqs=4, seed=0,
    skip_tokenizer_init=True,
)  # fmt: skip
refit = Refit(model, DIALECT, **options)

source = codes_source(refit)
assert isinstance(source, WeightSource)
assert source.held_names() is None
for _ in range(2):
    step()
    meta = source.metadata()
    pairs = list(NCCLTrainerWeightTransferEngine._checked_iter(source, meta))
    grouped = [
        pair for names, tensors in source.iter_groups() for pair in zip(names, tensors, strict=True)
    ]
    assert [name for name, _ in pairs] == [name for name, _ in grouped]
    assert len(source.groups()) == 4, "embeddings, two layers, norm and head"
    load(llm, source)
    given, _ = served(llm)
    print("whole, by the source:", (given - trained(refit)).abs().mean())
    assert (given - trained(refit)).abs().mean() < 0.01

receiver = Receiver()
for name, delta in refit.deltas():
    receiver.apply_delta(name, delta)
loaded = receiver.applied
step("layers.0.self_attn.q_proj", "layers.1.mlp.up_proj")
for name, delta in refit.deltas(receiver.version):
    receiver.apply_delta(name, delta)
changed = receiver.changed_since(loaded, ServedLlama.packed_modules_mapping)
assert {name.split(".", 2)[2].rpartition(".")[0] for name in changed} == {
    "0.self_attn.q_proj", "0.self_attn.k_proj", "0.self_attn.v_proj", "1.mlp.gate_proj",
    "1.mlp.up_proj",
}, changed.keys()  # fmt: skip
load(llm, changed.items())
given, held = served(llm)
print("what changed:", (given - trained(refit)).abs().mean())
assert (given - trained(refit)).abs().mean() < 0.01
load(llm, receiver.tensors.items())
again, everything = served(llm)
assert torch.equal(given, again)
assert all(torch.equal(held[name], each) for name, each in everything.items())
print("the server holds the same bytes after a part as after everything")
