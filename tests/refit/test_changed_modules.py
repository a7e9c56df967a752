"""Receiver.changed_since: what a server is given that builds whole modules anew."""

import pytest
import torch

import zerocast
from tests.support.exports import update
from tests.support.same_bytes import assert_same_bytes
from zerocast.errors import DeltaError
from zerocast.refit import Receiver, Refit
from zerocast.refit.delta import packed, whole_segment
from zerocast.tensors.digest import digest

LAYER = "model.layers.0."
MODULES = [
    f"{LAYER}self_attn.{name}_proj" for name in "qkvo"
] + [
    f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj", f"{LAYER}mlp.down_proj", f"{LAYER}mlp.gate",
    f"{LAYER}mlp.experts.0.w1", f"{LAYER}mlp.experts.1.w2",
]  # fmt: skip
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def fed() -> tuple[Refit, Receiver, dict[str, torch.Tensor]]:
    """A refit, a receiver of its first version, and the masters, by module."""
    generator = torch.Generator().manual_seed(0)
    masters = {name: torch.randn(32, 64, generator=generator) for name in MODULES}
    weights = [zerocast.empty((32, 64), "block", dtype=torch.bfloat16) for _ in masters]
    names = [f"{name}.weight" for name in MODULES]
    plan = zerocast.CastPlan(weights, [*masters.values()], [0] * len(weights), names=names)
    refit = Refit(plan, "compressed-tensors/fp8-channel", from_masters=True, dtype=torch.bfloat16)
    receiver = Receiver()
    update(refit, receiver)
    return refit, receiver, masters


def updated(refit: Refit, receiver: Receiver) -> int:
    """Apply what changed; return how many deltas were applied before."""
    before = receiver.applied
    update(refit, receiver)
    return before


def test_a_module_of_the_server_is_given_whole_or_not_at_all() -> None:
    """Codes and scales of all that it is made of, as they are now, in the order of the checkpoint;
    and as often as it is asked, until the server was given them.
    """
    refit, receiver, masters = fed()
    assert receiver.changed_since(0, PACKED) == receiver.tensors
    for changed, given in (
        (["q_proj"], ["q_proj", "k_proj", "v_proj"]),
        (["o_proj"], ["o_proj"]),
        (["up_proj", "w2"], ["gate_proj", "up_proj", "w1", "w2"]),
        (["mlp.gate"], ["mlp.gate"]),
        ([], []),
    ):
        for name, master in masters.items():
            if name.endswith(tuple(changed)):
                master[3, 5] *= -1
        before = updated(refit, receiver)
        found = receiver.changed_since(before, PACKED)
        modules = [name for name in MODULES if name.endswith(tuple(given))]
        assert list(found) == [
            f"{m}.{part}" for m in modules for part in ("weight", "weight_scale")
        ]
        sent = dict(refit.named_tensors())
        for name, tensor in found.items():
            assert_same_bytes(tensor, sent[name], name)
        assert receiver.changed_since(before, PACKED).keys() == found.keys()
        assert not receiver.changed_since(receiver.applied, PACKED)


def test_what_changed_in_two_versions_is_not_forgotten() -> None:
    """Where the server was given neither; and after a full sync, of any trainer, it is all."""
    refit, receiver, masters = fed()
    loaded = receiver.applied
    for module in (MODULES[0], MODULES[3]):
        masters[module][3, 5] *= -1
        update(refit, receiver)
    names = [name.rpartition(".")[0] for name in receiver.changed_since(loaded, PACKED)]
    assert list(dict.fromkeys(names)) == MODULES[:4]
    loaded = receiver.applied
    for name, delta in refit.deltas():
        receiver.apply_delta(name, delta)
    assert receiver.changed_since(loaded, PACKED) == receiver.tensors


@pytest.mark.parametrize(
    ("mapping", "given"),
    [
        ({}, ["q"]),
        ({"self_attn.qkv_proj": [f"self_attn.{name}_proj" for name in "qkv"]}, ["q", "k", "v"]),
        ({"qk": ["q_proj", "k_proj"], "kv": ["k_proj", "v_proj"]}, ["q", "k", "v"]),
        ({"a": ["q_proj", "o_proj"], "b": ["k_proj", "v_proj"]}, ["q", "o"]),
        ({".attn.qkv": [".self_attn.q_proj", ".self_attn.v_proj"]}, ["q", "v"]),
    ],
)
def test_mappings_of_vllm_are_taken(mapping: dict[str, list[str]], given: list[str]) -> None:
    """Names of one part, of several, with a dot before them; one name in two modules."""
    refit, receiver, masters = fed()
    masters[MODULES[0]][3, 5] *= -1
    found = receiver.changed_since(updated(refit, receiver), mapping)
    assert {name for name in found if name.endswith("weight")} == {
        f"{LAYER}self_attn.{each}_proj.weight" for each in given
    }


def test_fused_experts_are_one_module() -> None:
    """Those of a checkpoint that stores them together, beside their biases; not shared ones."""
    names = ["l.mlp.experts.gate_up_proj_blocks", "l.mlp.experts.gate_up_proj_scales",
             "l.mlp.experts.down_proj_bias", "l.mlp.shared_experts.up.weight", "s"]  # fmt: skip
    receiver, values = Receiver(), torch.arange(8, dtype=torch.uint8)
    delta = packed(
        [whole_segment(values)], since=None, version=1, total=int(digest(values)), shape=(8,),
        dtype=values.dtype,
    )  # fmt: skip
    for name in (*names, names[0]):
        receiver.apply_delta(name, delta)
    assert list(receiver.changed_since(len(names), {})) == names[:3]


def test_tensors_of_two_versions_are_not_given() -> None:
    """As long as deltas of a version have not all come."""
    refit, receiver, masters = fed()
    assert not Receiver().changed_since(0, PACKED)
    for master in masters.values():
        master[3, 5] *= -1
    deltas = list(refit.deltas(receiver.version))
    receiver.apply_delta(*deltas[0])
    with pytest.raises(DeltaError, match="several versions"):
        receiver.changed_since(0, PACKED)
    for each in deltas[1:]:
        receiver.apply_delta(*each)
    assert receiver.changed_since(0, PACKED) == receiver.tensors
