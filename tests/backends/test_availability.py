"""What a machine can multiply, by its compute capability."""

import pytest
import torch

import zerocast

QUESTIONS = {
    "fp8": zerocast.is_fp8_available,
    "mxfp8": zerocast.is_mxfp8_available,
    "nvfp4": zerocast.is_nvfp4_available,
    "block": zerocast.is_fp8_block_scaling_available,
}


def test_availability_has_its_reason_on_demand():
    """A bool; with return_reason a pair: what a machine cannot multiply has its reason, which is
    empty where it can. Without a GPU the default recipe is delayed scaling, and it works.
    """
    for question in QUESTIONS.values():
        available, reason = question(return_reason=True)
        assert isinstance(available, bool)
        assert question() is available
        assert bool(reason) is not available
    if not torch.cuda.is_available():
        assert zerocast.get_default_recipe() == zerocast.DelayedScaling()
        assert "CUDA device" in zerocast.is_fp8_available(return_reason=True)[1]
    with zerocast.autocast() as active:
        assert active.recipe == zerocast.get_default_recipe()


@pytest.mark.parametrize(
    ("capability", "available", "recipe"),
    [
        ((8, 0), "", "DelayedScaling"),
        ((8, 9), "fp8", "DelayedScaling"),
        ((9, 0), "fp8 block", "DelayedScaling"),
        ((10, 0), "fp8 mxfp8 nvfp4 block", "MXFP8BlockScaling"),
        ((12, 0), "fp8 nvfp4 block", "Float8CurrentScaling"),
    ],
)
def test_availability_by_compute_capability(
    capability, available, recipe, monkeypatch: pytest.MonkeyPatch
):
    """From Ada to Blackwell; a device that says no names its own capability."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    answers = {name: question(return_reason=True) for name, question in QUESTIONS.items()}
    assert [name for name in answers if answers[name][0]] == available.split()
    assert all(
        answer or f"{capability[0]}.{capability[1]}" in why for answer, why in answers.values()
    )
    assert type(zerocast.get_default_recipe()).__name__ == recipe
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert not zerocast.is_fp8_block_scaling_available()
