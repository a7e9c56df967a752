"""zerocast.megatron where Megatron-Core is missing, or is one that it does not know."""

import sys
import types
from importlib.util import find_spec

import pytest

import zerocast.megatron
from zerocast.errors import UnsupportedError


@pytest.mark.skipif(find_spec("megatron") is not None, reason="Megatron-Core is installed")
def test_its_absence_is_said():
    """The error names the package that is to be installed."""
    with pytest.raises(UnsupportedError, match="pip install megatron-core"):
        zerocast.megatron.install()


def test_unknown_functions_are_refused_with_nothing_replaced(monkeypatch):
    """One function with another parameter: it is named, and the others stay what they were."""

    def is_float8tensor(tensor, strictly):
        return False

    class Buffer:
        def __init__(self):
            pass

    fp8 = types.SimpleNamespace(__name__="megatron.core.fp8_utils", is_float8tensor=is_float8tensor)
    core = types.ModuleType("megatron.core")
    core.fp8_utils, core.fp4_utils = fp8, types.SimpleNamespace()
    distributed = types.ModuleType("megatron.core.distributed")
    distributed.param_and_grad_buffer = types.SimpleNamespace(
        __name__="buffers", _ParamAndGradBuffer=Buffer
    )
    made = Buffer.__init__
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.setitem(sys.modules, "megatron.core.distributed", distributed)
    with pytest.raises(UnsupportedError, match=r"is_float8tensor\(tensor\), got .*strictly"):
        zerocast.megatron.install()
    assert fp8.is_float8tensor is is_float8tensor
    assert Buffer.__init__ is made
