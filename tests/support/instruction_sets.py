"""The native backend's instruction sets; what imports this is skipped where it is not."""

import pytest

from zerocast.backends import native_library
from zerocast.errors import BackendError

try:
    ISAS = native_library.instruction_sets(native_library.load())
except BackendError as error:
    pytest.skip(str(error), allow_module_level=True)
