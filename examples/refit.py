"""Train a GPT under FSDP2 on some ranks, and feed its weights to receivers on the others.

    torchrun --nproc-per-node 6 examples/refit.py
    mpirun -n 6 python -m mpi4py examples/refit.py --dialect compressed-tensors/nvfp4 --lr 1e-6

The last ``--receivers`` ranks do not train. After every step they receive what changed of the
codes and scales, bring their copies up to date, decode them as a server would, and evaluate. Their
loss is that of the trainer's own weights, bit for bit; the exit code is 1 where it is not. With
``--lose`` a delta is lost on its way: the receivers refuse the next one, and ask for a full sync.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from gpt.data import Corpus, load_corpus, sample
from gpt.launch import fast_dtype, launched_process_group
from gpt.model import GPT
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerocast
from zerocast.export import DIALECTS, decode_tensors
from zerocast.refit import Receiver, Refit

TRAINED = {
    "deepseek/fp8-ue8m0": zerocast.Float8BlockScaling(),
    "compressed-tensors/nvfp4": zerocast.NVFP4BlockScaling(),
    "modelopt/mxfp8": zerocast.MXFP8BlockScaling(enable_2d_quantization=True),
}
"""By dialect, a recipe whose bytes it holds as they are."""

BATCH = 8
"""Sequences of a training step on each trainer, and of the evaluation."""


def held_out(corpus: Corpus) -> tuple[torch.Tensor, torch.Tensor]:
    """The text that all evaluate on."""
    return sample(corpus.validation, BATCH, GPT.context, torch.Generator().manual_seed(0))


def sharded_model(dialect: str, mesh: DeviceMesh, dtype: torch.dtype) -> GPT:
    """FP32 masters, sharded, gathered in codes."""
    torch.manual_seed(0)
    model = GPT()
    zerocast.nn.convert(model, TRAINED[dialect], weights="master", filter_fqns=["head"])
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


# --- between the first trainer and the receivers ---


def send(deltas: Iterator[tuple[str, torch.Tensor]], link: dist.ProcessGroup | None) -> int:
    """Send what ``deltas`` yields from the first trainer, which has the ``link``; the bytes."""
    sent = 0
    for name, delta in deltas:
        if link is not None:
            dist.broadcast_object_list([(name, len(delta))], src=0, group=link)
            dist.broadcast(delta, src=0, group=link)
        sent += len(delta)
    if link is not None:
        dist.broadcast_object_list([None], src=0, group=link)
    return sent


def received(link: dist.ProcessGroup) -> Iterator[tuple[str, torch.Tensor]]:
    """What the first trainer sends."""
    while True:
        announced: list[tuple[str, int] | None] = [None]
        dist.broadcast_object_list(announced, src=0, group=link)
        if announced[0] is None:
            return
        name, size = announced[0]
        delta = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(delta, src=0, group=link)
        yield name, delta


def exchanged(answer: object, link: dist.ProcessGroup) -> list[object]:
    """What the receivers answer."""
    answers: list[object] = [None] * dist.get_world_size(link)
    dist.all_gather_object(answers, answer, group=link)
    return answers[1:]


# --- the two sides ---


def train(
    arguments: argparse.Namespace,
    trainers: dist.ProcessGroup,
    link: dist.ProcessGroup | None,
    dtype: torch.dtype,
) -> int:
    """Train, and feed the receivers after every step; 1 where their loss is another."""
    rank, corpus, wrong = dist.get_rank(), load_corpus(), 0
    model = sharded_model(arguments.dialect, DeviceMesh.from_group(trainers, "cpu"), dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    refit = Refit(model, arguments.dialect, dtype=dtype, group=trainers)
    elements = sum(p.numel() for p in model.parameters())
    draw = torch.Generator().manual_seed(rank)

    def feed(since: int | None) -> tuple[int, list[object]]:
        sent = send(refit.deltas(since), link)
        answers = [exchanged(None, link) if link is not None else None]
        dist.broadcast_object_list(answers, src=0, group=trainers)
        return sent, answers[0]

    for step in range(arguments.steps):
        model(*sample(corpus.training, BATCH, GPT.context, draw)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss = model(*held_out(corpus)).item()
        if step == arguments.lose:
            send(refit.deltas(refit.version), None)
        sent, answers = feed(refit.version if step else None)
        if any(isinstance(answer, str) for answer in answers):
            if rank == 0:
                print(f"step {step}: a receiver refused: {answers[0]}", flush=True)
            sent, answers = feed(None)
        wrong += sum(answer != loss for answer in answers)
        if rank == 0:
            print(
                f"step {step}: loss {loss:.6f}, the same at {answers.count(loss)} receivers; sent "
                f"{sent / 1e3:,.1f} kB, {sent / elements:.5f} bytes an element",
                flush=True,
            )
    return int(wrong > 0)


def receive(arguments: argparse.Namespace, link: dist.ProcessGroup, dtype: torch.dtype) -> int:
    """Apply what is sent, decode it and evaluate; 1 where the trainers end with an error."""
    receiver, text = Receiver(), held_out(load_corpus())
    model = GPT().to(dtype)
    for _ in range(arguments.steps):
        is_fed = False
        while not is_fed:
            answer = updated_loss(receiver, list(received(link)), model, text, arguments, dtype)
            is_fed = not any(isinstance(each, str) for each in exchanged(answer, link))
    return 0


def updated_loss(
    receiver: Receiver,
    deltas: list[tuple[str, torch.Tensor]],
    model: GPT,
    text: tuple[torch.Tensor, torch.Tensor],
    arguments: argparse.Namespace,
    dtype: torch.dtype,
) -> float | str:
    """The loss with the weights that ``deltas`` lead to, or why they were refused."""
    try:
        for name, delta in deltas:
            receiver.apply_delta(name, delta)
    except zerocast.DeltaError as error:
        return str(error)
    decoded = decode_tensors(receiver.tensors, DIALECTS[arguments.dialect], dtype)
    with torch.no_grad():
        model.load_state_dict({
            name: t.dequantize() if isinstance(t, zerocast.QuantizedTensor) else t
            for name, t in decoded.items()
        })  # fmt: skip
        return model(*text).item()


def main() -> int:
    """Divide the ranks of this job into trainers and receivers, and run them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dialect", choices=list(TRAINED), default="deepseek/fp8-ue8m0")
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--lose", type=int, default=-1, help="lose the delta before this step's")
    arguments = parser.parse_args()
    with launched_process_group() as comm:
        ranks = list(range(comm.size))
        training = ranks[: comm.size - arguments.receivers]
        if not 0 < len(training) < comm.size:
            raise SystemExit(
                f"--receivers {arguments.receivers} of {comm.size} ranks leave no trainer, or no "
                f"receiver"
            )
        trainers = dist.new_group(training)
        link = dist.new_group([0, *ranks[len(training) :]])
        dtype = fast_dtype(comm)
        if comm.rank in training:
            wrong = train(arguments, trainers, link if comm.rank == 0 else None, dtype)
        else:
            wrong = receive(arguments, link, dtype)
        return max(comm.all_gather_object(wrong))


if __name__ == "__main__":
    sys.exit(main())
