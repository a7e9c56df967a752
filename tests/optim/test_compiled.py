"""Compiled steps: a cast reads the masters, so it sees what compiled kernels wrote."""

from typing import Any

import pytest
import torch

from tests.optim.training import NVFP4, assert_cast_of, draw_gradients, make_params, set_gradients
from zerocast.optim import ZeroOptimizer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["inner", "step"])
def test_weights_are_the_cast_of_masters_that_inductor_wrote(what: str) -> None:
    """The inner optimizer's step or the whole step compiled: masters move at every step, and the
    weights are their cast.
    """
    params: list[Any] = make_params(NVFP4)
    optimizer = ZeroOptimizer(params, torch.optim.SGD, lr=0.125)
    plain_params: list[Any] = make_params(NVFP4)
    plain = ZeroOptimizer(plain_params, torch.optim.SGD, lr=0.125)
    step = optimizer.step
    if what == "inner":
        optimizer.inner.step = torch.compile(optimizer.inner.step)  # type: ignore[method-assign]
    else:
        step = torch.compile(optimizer.step)
    for n in range(3):
        for ours in (params, plain_params):
            set_gradients(ours, draw_gradients([p.shape for p in ours], n, 0))
        step()
        plain.step()
        masters = [optimizer.gather_master(p) for p in params]
        assert_cast_of(params, masters)
    for mine, other in zip(masters, [plain.gather_master(p) for p in plain_params], strict=True):
        torch.testing.assert_close(mine, other)
