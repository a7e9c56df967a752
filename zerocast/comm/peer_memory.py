"""The memory of other processes of one machine, which the system may let a process read.

On Linux that takes ``process_vm_readv``: between processes of one user, unless a container or
ptrace's settings (Yama) forbid it. It reads what is there; the caller synchronizes reads with the
writes of the other process.

One process number may mean different processes in two containers: containers of one host have
process 1 each, and copies of one process (forked, or restored from a snapshot) have the same memory
at the same addresses. So each reading first checks a random token, which was drawn for that reading
and is no other rank's.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from typing import NamedTuple

import torch

_RANK_BITS = 23


def draw_token(rank: int) -> ctypes.c_int64:
    """Draw a number that identifies the process of ``rank`` while others read its memory.

    It is drawn for each reading, because copies of a process have its earlier numbers. It contains
    the rank, because copies of a machine may draw equal numbers: so a rank never takes itself for a
    peer.
    """
    return ctypes.c_int64(secrets.randbits(63 - _RANK_BITS) << _RANK_BITS | rank)


class PeerBuffer(NamedTuple):
    """A buffer of some process.

    Attributes:
        process: the number of the process, as it sees itself.
        address: the address of the first byte.
        token_address, token: the address at which that process holds this random number. Another
            process that is found by the same number does not hold it there.
    """

    process: int
    address: int
    token_address: int
    token: int

    @classmethod
    def of(cls, buffer: torch.Tensor, token: ctypes.c_int64) -> PeerBuffer:
        """Return what other processes need in order to read ``buffer``, on the CPU and contiguous.
        Keep both until they have read it.
        """
        return cls(os.getpid(), buffer.data_ptr(), ctypes.addressof(token), token.value)


def read(peer: PeerBuffer, start: int, into: torch.Tensor) -> None:
    """Copy the bytes of ``peer`` from byte ``start`` on into ``into``, uint8 and contiguous.

    Raises:
        OSError: where they cannot be read: by the system, or because it is another process.
    """
    token = ctypes.c_int64()
    _read(peer.process, peer.token_address, ctypes.addressof(token), ctypes.sizeof(token))
    if token.value != peer.token:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    _read(peer.process, peer.address + start, into.data_ptr(), into.nbytes)


class _Iovec(ctypes.Structure):
    """A range of memory, as ``process_vm_readv`` takes it."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _read(process: int, address: int, to: int, size: int) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    function.restype = ctypes.c_ssize_t
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    while size > 0:  # one call may read less
        local, remote = _Iovec(to, size), _Iovec(address, size)
        done = function(process, ctypes.byref(local), one, ctypes.byref(remote), one, none)
        if done <= 0:
            number = ctypes.get_errno() if done < 0 else errno.EFAULT
            raise OSError(number, os.strerror(number))
        to, address, size = to + done, address + done, size - done
