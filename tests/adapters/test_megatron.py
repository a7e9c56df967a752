"""zerocast.adapters.megatron where Megatron-Core is not installed. tests/integration runs it beside
Megatron-Core.
"""

from importlib.util import find_spec

import pytest

import zerocast.adapters.megatron
from zerocast.errors import UnsupportedError


@pytest.mark.skipif(find_spec("megatron") is not None, reason="Megatron-Core is installed")
def test_its_absence_is_said():
    """The error names the package that is to be installed."""
    with pytest.raises(UnsupportedError, match="pip install megatron-core"):
        zerocast.adapters.megatron.install()
