"""Uncopied: the base of objects that belong to the memory, launches and ranks of their process.

A copy of such an object would write to the memory of the original, or call collectives that no
other rank calls.
"""

from typing import ClassVar, NoReturn

from zerocast.errors import UnsupportedError


class Uncopied:
    """Refuses to be copied, pickled or saved by ``torch.save``.

    Attributes:
        instead: what to do, for the message.
    """

    instead: ClassVar[str]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsupportedError(
            f"{type(self).__name__} cannot be copied or pickled, because it belongs to memory "
            f"and ranks of this process; {self.instead}."
        )
