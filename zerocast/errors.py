"""The errors that zerocast raises for its users.

Every error that zerocast raises on purpose is a :class:`ZerocastError` and also a matching built-in
exception, so ``except ValueError`` keeps working. Messages say what is required, what was given and
what to do. An ``assert`` in this project checks for bugs in zerocast, never for caller mistakes.

This is the first module that ``import zerocast`` loads, so it also rejects an old torch.
"""

import torch

OLDEST_TORCH = "2.11"
"""The oldest supported torch; pyproject.toml and README.md state the same version."""


class ZerocastError(Exception):
    """Base class of every error that zerocast raises on purpose.

    Attributes:
        is_alone: True if only this rank raises it and no collective reports it to the others.
    """

    is_alone = False


class InputError(ZerocastError, ValueError):
    """An argument is not what the function requires. Nothing has been written."""


class RankMismatchError(InputError):
    """The ranks of a group were given inconsistent arguments. No rank has written anything."""


class NonFiniteError(ZerocastError, ValueError):
    """``check_finite=True`` found a NaN or an infinity in a master weight. No codes or scales have
    been written.
    """


class StaleCopyError(ZerocastError, RuntimeError):
    """A derived copy was read between a cast and its post-all-gather processing."""


class UnsupportedError(ZerocastError, NotImplementedError):
    """The operation is deliberately not supported; the message says why and what to use instead."""


class TorchVersionError(ZerocastError, ImportError):
    """The installed torch is older than zerocast needs. ``import zerocast`` raises it."""


class BackendError(ZerocastError, RuntimeError):
    """A requested backend cannot run here; the message gives the reason and the remedy."""


class MissingDataError(ZerocastError, AttributeError):
    """The weight's recipe does not store the requested data, or the weight was made without it."""


class ChangedWeightError(ZerocastError, RuntimeError):
    """A cast or a copy has overwritten the weight between a forward and its backward."""


class UnfinishedStepError(ZerocastError, RuntimeError):
    """An optimizer step, a cast or an all-gather failed after it had begun to write.

    After a failed step, masters, optimizer state and weights belong to different steps. A weight
    whose cast or all-gather failed holds parts of two casts; reading it raises this error.
    """


class VerificationError(ZerocastError, RuntimeError):
    """Ranks hold wrong bytes of a weight, because of a fault in memory, transport or code. Do not
    use the weights.
    """


class PeerFailedError(ZerocastError, RuntimeError):
    """A collective did not complete because another rank raised, exited or timed out. Do not use
    its outputs; the group runs no further collective.
    """


class PeerTimeoutError(PeerFailedError, TimeoutError):
    """A collective did not complete within the communicator's timeout."""


class DeltaError(ZerocastError, ValueError):
    """A weight delta does not follow the receiver's version, or is damaged. Nothing has been
    written; recover by a full sync.
    """


if torch.__version__ < OLDEST_TORCH:
    raise TorchVersionError(
        f"zerocast needs torch {OLDEST_TORCH} or newer, and torch {torch.__version__} is installed "
        f"in {torch.__path__[0]}; install a newer one: pip install 'torch>={OLDEST_TORCH}'"
    )
