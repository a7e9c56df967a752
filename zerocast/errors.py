"""The errors that zerocast raises for its users.

Every error that zerocast raises on purpose is a :class:`ZerocastError` and also the built-in
exception that a Python user would expect, so ``except ValueError`` keeps working. Messages say what
is required, what was given and what to do. An ``assert`` in this project is about our own mistakes,
never about the caller's.

An old torch is refused here, by the first module that ``import zerocast`` loads.
"""

import torch

OLDEST_TORCH = "2.11"
"""As in pyproject.toml, by which pip chooses, and README.md."""


class ZerocastError(Exception):
    """Base of everything zerocast raises on purpose.

    Attributes:
        is_alone: whether no other rank raises it, too, or is told by a collective.
    """

    is_alone = False


class InputError(ZerocastError, ValueError):
    """An argument is not what the function requires. Nothing has been written."""


class RankMismatchError(InputError):
    """The ranks of a group were given arguments that do not fit together. Nothing has been written
    on any of them.
    """


class NonFiniteError(ZerocastError, ValueError):
    """``check_finite=True`` met a NaN or an infinity in a master weight. No code and no scale has
    been written.
    """


class StaleCopyError(ZerocastError, RuntimeError):
    """A derived copy was read between a cast and its post-all-gather processing."""


class UnsupportedError(ZerocastError, NotImplementedError):
    """The operation is understood and deliberately refused; the message says why and what to use
    instead.
    """


class TorchVersionError(ZerocastError, ImportError):
    """The installed torch is older than zerocast needs. ``import zerocast`` raises it."""


class BackendError(ZerocastError, RuntimeError):
    """A backend that was asked for cannot run here; the message carries the reason and the
    remedy.
    """


class MissingDataError(ZerocastError, AttributeError):
    """A weight was asked for data that its recipe does not store, or that it was made without."""


class ChangedWeightError(ZerocastError, RuntimeError):
    """A backward needs the weight that its forward used, and a cast or a copy has written it
    since.
    """


class UnfinishedStepError(ZerocastError, RuntimeError):
    """A step of an optimizer failed after it had begun to change masters, so masters, optimizer
    state and weights belong to different steps. Or a weight was read whose cast or all-gather
    failed after it had begun to write, so that it holds parts of two casts.
    """


class VerificationError(ZerocastError, RuntimeError):
    """Ranks hold other bytes of a weight than they should: a fault of memory, of a transport, or of
    code. The weights are not to be used.
    """


class PeerFailedError(ZerocastError, RuntimeError):
    """A collective did not end, because another rank raised, ended, or gave up waiting. Whatever it
    was to write is not to be used, and its group makes no further collective.
    """


class PeerTimeoutError(PeerFailedError, TimeoutError):
    """A collective did not end within the communicator's timeout."""


class DeltaError(ZerocastError, ValueError):
    """A delta of weights does not follow what its receiver holds, or was damaged. Nothing has been
    written; a full sync repairs it.
    """


if torch.__version__ < OLDEST_TORCH:
    raise TorchVersionError(
        f"zerocast needs torch {OLDEST_TORCH} or newer, and torch {torch.__version__} is installed "
        f"in {torch.__path__[0]}; install a newer one: pip install 'torch>={OLDEST_TORCH}'"
    )
