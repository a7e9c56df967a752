"""The tests as they are, in a program that has set torch's default dtype or device.

``pytest --torch-default bfloat16`` (or ``float64``, ``meta``) sets it. What a test itself makes
stays as it wrote it: in the modules of the tests, and in torch's own layers, the name ``torch``
then means a copy of the module whose factories make FP32 tensors on the CPU. So only what zerocast
makes, and how it promotes numbers, can follow the default. Tests marked ``own_defaults`` are left
out: those that set torch's defaults themselves, or use a program that follows them, as the step
counters of torch's optimizers follow the device: ``own_defaults("meta")``.
"""

import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

import zerocast.arguments

CHOICES = ("bfloat16", "float64", "meta")

OF_FLOATS = {"empty", "empty_strided", "eye", "linspace", "ones", "rand", "randn", "zeros"}
OF_WHAT_IS_GIVEN = {"arange", "full", "scalar_tensor", "tensor"}
OF_INTEGERS = {"randint", "randperm"}


def set_default(name: str) -> None:
    """For the rest of the process."""
    stated = _with_stated_factories("cpu" if name == "meta" else None)
    for module_name, module in list(sys.modules.items()):
        of_tests = (
            module_name.startswith(("tests.", "torch.nn.modules.")) and module_name != __name__
        )
        if of_tests and vars(module).get("torch") is torch:
            module.torch = stated  # type: ignore[attr-defined]
    zerocast.arguments.torch = _with_own_defaults()  # asked where a caller states neither
    if name != "meta":
        torch.set_default_dtype(getattr(torch, name))
        return
    torch.set_default_device(name)
    run = threading.Thread.run

    def run_under_default(self: threading.Thread) -> None:  # which torch has for each thread
        with torch.device(name):
            run(self)

    threading.Thread.run = run_under_default  # type: ignore[method-assign]


def _copy_of_torch() -> ModuleType:
    copy = ModuleType("torch")
    vars(copy).update(vars(torch))
    return copy


def _with_own_defaults() -> ModuleType:
    copy = _copy_of_torch()
    copy.get_default_dtype = lambda: torch.float32  # type: ignore[attr-defined]
    copy.get_default_device = lambda: torch.device("cpu")  # type: ignore[attr-defined]
    return copy


def _with_stated_factories(device: str | None) -> ModuleType:
    copy = _copy_of_torch()
    for name in OF_FLOATS | OF_WHAT_IS_GIVEN | OF_INTEGERS:
        setattr(copy, name, _stated(getattr(torch, name), name, device))
    return copy


def _stated(
    factory: Callable[..., torch.Tensor], name: str, device: str | None
) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **options: Any) -> torch.Tensor:
        if options.get("device") is None:
            options["device"] = device
        if options.get("dtype") is not None or name in OF_INTEGERS:
            return factory(*args, **options)
        if name in OF_FLOATS or factory(*args, **options).is_floating_point():
            options["dtype"] = torch.float32
        return factory(*args, **options)

    return make
