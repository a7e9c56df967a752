"""The oldest release of torch that zerocast runs on; an older one is refused by importing this."""

import torch

from zerocast.errors import TorchVersionError

OLDEST_TORCH = "2.11"
"""As in pyproject.toml, by which pip chooses, and README.md."""

if torch.__version__ < OLDEST_TORCH:
    raise TorchVersionError(
        f"zerocast needs torch {OLDEST_TORCH} or newer, and torch {torch.__version__} is installed "
        f"in {torch.__path__[0]}; install a newer one: pip install 'torch>={OLDEST_TORCH}'"
    )
