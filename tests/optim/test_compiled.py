"""Compiled steps: a cast reads the masters, so it sees what compiled kernels wrote."""

from typing import Any

import pytest
import torch

from tests.optim.training import NVFP4, Training, assert_cast_of


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["inner", "step"])
def test_weights_are_the_cast_of_masters_that_inductor_wrote(what: str) -> None:
    """The inner optimizer's step or the whole step compiled: masters move at every step, and the
    weights are their cast.
    """
    compiled, plain = (Training(None, NVFP4, torch.optim.SGD, lr=0.125) for _ in range(2))
    stepped: Any = compiled.optimizer if what == "step" else compiled.optimizer.inner
    stepped.step = torch.compile(stepped.step)
    for step in range(3):
        assert_cast_of(compiled.train(step), compiled.masters())
        plain.train(step)
    for mine, other in zip(compiled.masters(), plain.masters(), strict=True):
        torch.testing.assert_close(mine, other)
