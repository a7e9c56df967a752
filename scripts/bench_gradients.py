"""How much of the gradients' way a backward pass hides, and how much memory gradients take.

Ranks are threads. Each trains layers whose backward sleeps, as a device would compute, over a
transport that sleeps by the bytes that it is given, one exchange after another. So the figures
depend little on what else the machine does. The same training runs with and without
``overlap_grad_reduce``. What can be hidden is the shorter of computing and sending; what is hidden,
the difference of the two times of a step.

    python scripts/bench_gradients.py                     # 24 layers, 4 ranks
    python scripts/bench_gradients.py --ranks 2 --send 2  # sending takes twice as long as computing

Exit code 0 where at least 70 % of what can be hidden is, and gradients take at most this rank's
shards in FP32, two buckets and the largest layer; else 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import zerocast
from zerocast.comm import Communicator, RecordingCommunicator, run_in_process
from zerocast.optim import ZeroOptimizer
from zerocast.optim.taken_gradient import TakenGradient

LEAST_HIDDEN = 0.7


class SlowWire(RecordingCommunicator):
    """Exchanges take turns on one wire, and arrive when the last of their bytes has passed.

    Attributes:
        bytes_per_second: of the wire.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.bytes_per_second = float("inf")
        self._free_at = 0.0

    def start_all_to_all(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        received: Sequence[int] | None = None,
        sent: Sequence[int] | None = None,
    ) -> Callable[[], None]:
        """Begin an exchange; what is returned sleeps until it is over."""
        exchange = super().start_all_to_all
        seconds = buffer.nbytes * (self.size - 1) / self.size / self.bytes_per_second
        self._free_at = max(self._free_at, time.perf_counter()) + seconds
        arrives_at = self._free_at

        def wait() -> None:
            time.sleep(max(0.0, arrives_at - time.perf_counter()))
            exchange(output, buffer, received, sent)()

        return wait


class Slow(torch.autograd.Function):
    """The identity, whose backward takes some seconds."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Return ``x``."""
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sleep."""
        time.sleep(ctx.seconds)
        return grads[0], None


@dataclass(frozen=True)
class Result:
    """What one rank measured: seconds of a step, and bytes of gradients at their peak, and of the
    shards in FP32, the largest bucket and the largest layer.
    """

    step: float
    peak: int
    shards: int
    bucket: int
    layer: int


def measure(comm: Communicator, args: argparse.Namespace, overlap: bool) -> Result:
    """Train a few steps; the first is not timed."""
    wire = SlowWire(comm)
    layers = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 256),
                            torch.nn.Linear(256, 64)) for _ in range(args.layers)
    )  # fmt: skip
    zerocast.nn.convert(layers, "nvfp4")
    layers.bfloat16()
    elements = sum(p.numel() for p in layers[0].parameters())
    params, held, peak = list(layers.parameters()), dict[int, int](), 0

    def look(grad: torch.Tensor) -> None:
        nonlocal peak
        grads = [p.grad for p in params if p.grad is not None]
        whole = sum(g.nbytes for g in grads if not isinstance(g, TakenGradient))
        peak = max(peak, whole + grad.nbytes + sum(held.values()))

    for param in params:
        param.register_hook(look)  # before the optimizer's, which takes what came before
    optimizer = ZeroOptimizer(
        layers.named_parameters(), group=wire, overlap_grad_reduce=overlap, bucket_size=elements
    )
    reducer = optimizer._gradients
    tensors = [reducer.reduced, *(each.buffer for each in reducer._rounds)]
    held |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    total_bytes = 2 * elements * args.layers * (comm.size - 1) / comm.size
    wire.bytes_per_second = total_bytes / (args.seconds * args.layers * args.send)
    times = []
    for _ in range(args.steps + 1):
        comm.barrier()
        start = time.perf_counter()
        x = torch.ones(2, 64, dtype=torch.bfloat16)
        for layer in layers:
            x = x + Slow.apply(layer(x), args.seconds)
        x.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    bucket = max(each.nbytes for each in reducer._rounds)
    return Result(min(times[1:]), peak, 4 * reducer.reduced.numel(), bucket, 2 * elements)


def main() -> int:
    """Print both times and the memory; the exit code says whether they are within bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a layer's backward")
    parser.add_argument("--send", type=float, default=1.0, help="sending over computing")
    args = parser.parse_args()
    serial, overlapped = (
        run_in_process(args.ranks, lambda comm, o=overlap: measure(comm, args, o))[0]
        for overlap in (False, True)
    )
    computing = args.seconds * args.layers
    sending = computing * args.send
    hidden = (serial.step - overlapped.step) / min(computing, sending)
    print(f"{args.ranks} ranks, {args.layers} layers; a backward pass computes for "
          f"{computing:.2f} s and its gradients take {sending:.2f} s")  # fmt: skip
    print(f"a step takes {serial.step:.3f} s, with overlap {overlapped.step:.3f} s: "
          f"{hidden:.0%} of what can be hidden is")  # fmt: skip
    limit = overlapped.shards + 2 * overlapped.bucket + overlapped.layer
    print(f"gradients take {overlapped.peak:,} bytes at most (whole ones: {serial.peak:,}); shards "
          f"{overlapped.shards:,} + 2 buckets of {overlapped.bucket:,} + a layer of "
          f"{overlapped.layer:,} are {limit:,}")  # fmt: skip
    return 0 if hidden >= LEAST_HIDDEN and overlapped.peak <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
