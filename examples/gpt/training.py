"""One training run: the loop, and what it measures."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

import zerocast
from gpt.check import check_weights
from gpt.data import Corpus, sample
from gpt.model import GPT
from zerocast.comm import Communicator, RecordingCommunicator
from zerocast.optim import ZeroOptimizer

RECIPES = {
    "bf16": None,  # nothing quantized: the run to compare with
    **{name: recipe() for name, recipe in zerocast.recipes.RECIPES.items()},
    "nvfp4-4over6": zerocast.NVFP4BlockScaling(nvfp4_4over6="weights"),
}

WARMUP = 20
"""Steps over which the learning rate rises; it falls to a tenth along a cosine after them."""

MAX_NORM = 1.0
"""Of all gradients. The first steps at the full rate give norms of 20; without clipping some runs
lose a hundred steps there, and it is luck which."""

BUCKET_SIZE = 2**19
"""Elements of a bucket that is waited for by itself: most of a block."""

VALIDATION_BATCHES = 16
"""Batches of the size of a training batch, the same ones for every run."""

VALIDATIONS = 10
"""How often a run is validated; one of few steps every 10, and at the end."""


@dataclass(frozen=True)
class Settings:
    """What all runs of one launch share.

    Attributes:
        batch: sequences a step, over all ranks.
        lr: the learning rate, at its highest.
        dtype: of all that is not quantized.
        autocast: whether activations and gradients are quantized, too.
        overlap: whether a step returns while codes are on their way to the next forward.
        verify: what ranks compare after each step: "off", "hash" or "full".
        checkpoint: a folder for checkpoints, or None.
        check: whether the weights are compared byte for byte at the end.
    """

    steps: int
    seed: int
    batch: int
    lr: float
    dtype: torch.dtype
    autocast: bool
    overlap: bool
    verify: Literal["off", "hash", "full"]
    checkpoint: str | None
    check: bool

    def region(self, recipe: str, comm: Communicator) -> AbstractContextManager[object]:
        """Where forwards run. Leaving it is collective: delayed scaling reduces its amaxes then."""
        if not self.autocast or RECIPES[recipe] is None:
            return nullcontext()
        return zerocast.autocast(recipe=RECIPES[recipe], amax_reduction_group=comm)


@dataclass
class Run:
    """What one run gave; the same on all ranks but for timings, which are this rank's.

    Attributes:
        losses: of every step, nats a byte, the mean over ranks.
        validation_losses: pairs of a number of steps and the loss after them; the last one is
            after all.
        sent_bytes: by kind of collective: what this rank sends a step.
        held_bytes: of weights, masters and optimizer state: what this rank holds.
        seconds: by phase: what this rank spends a step.
        verdict: whether the weights are right and that in words; None where nobody asked.
    """

    recipe: str
    losses: list[float]
    validation_losses: list[tuple[int, float]]
    sent_bytes: dict[str, float]
    held_bytes: dict[str, int]
    seconds: dict[str, float]
    verdict: tuple[bool, str] | None

    @property
    def validation_loss(self) -> float:
        """After the last step."""
        return self.validation_losses[-1][1]


def train(recipe: str, settings: Settings, corpus: Corpus, comm: Communicator) -> Run:
    """Train a GPT whose linear layers, but for the last one, are of ``recipe``. Collective."""
    comm = RecordingCommunicator(comm)
    torch.manual_seed(settings.seed)  # the same model on every rank
    model = GPT()
    if RECIPES[recipe] is not None:
        zerocast.nn.convert(model, RECIPES[recipe], filter_fqns=["head"])
    model.to(settings.dtype)
    overlap: dict[str, Any] = {"overlap_all_gather": True, "bucket_size": BUCKET_SIZE}
    optimizer = ZeroOptimizer(
        model.named_parameters(),
        group=comm,
        lr=settings.lr,
        verify="off" if RECIPES[recipe] is None else settings.verify,
        **(overlap if settings.overlap else {}),
    )
    schedule = warmup_and_cosine(optimizer, settings.steps, settings.lr)
    clock = Clock()
    optimizer.on_phase = clock.phase
    draw = torch.Generator().manual_seed(settings.seed * comm.size + comm.rank)

    losses = torch.zeros(settings.steps)
    validation_losses: list[tuple[int, float]] = []
    between = max(10, settings.steps // VALIDATIONS)
    path, first = settings.checkpoint and Path(settings.checkpoint, recipe), 0
    if path is not None and path.exists():
        loaded = zerocast.checkpoint.load(path, optimizer, model)
        schedule.load_state_dict(loaded.extra["schedule"])
        first, validation_losses = loaded.steps, loaded.extra["validation_losses"]
        if loaded.of_rank is not None:  # on another number of ranks each draws other text
            draw.set_state(loaded.of_rank["draw"])
            losses[:first] = loaded.of_rank["losses"]
    progress = tqdm(
        range(first, settings.steps), desc=recipe, disable=comm.rank > 0, mininterval=1.0
    )
    for step in progress:
        with comm.label("step"):
            with clock.phase("forward_backward"):
                text = sample(corpus.training, settings.batch // comm.size, GPT.context, draw)
                with settings.region(recipe, comm):
                    loss = model(*text)
                loss.backward()
            with clock.phase("clip"):
                optimizer.clip_grad_norm_(MAX_NORM)
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses[step] = loss.item()
        if step % 10 == 0:
            mean = losses[max(0, step - 9) : step + 1].mean()
            progress.set_postfix_str(f"loss {mean:.3f}", refresh=False)
        if (step + 1) % between == 0 or step + 1 == settings.steps:
            loss_now = validate(model, recipe, settings, corpus, comm)
            validation_losses.append((step + 1, loss_now))
            if path is not None:
                zerocast.checkpoint.save(
                    path,
                    optimizer,
                    model,
                    extra={
                        "schedule": schedule.state_dict(),
                        "validation_losses": validation_losses,
                    },
                    of_rank={"draw": draw.get_state(), "losses": losses[: step + 1]},
                    asynchronous=True,
                )

    comm.all_reduce_sum_(losses)
    return Run(
        recipe=recipe,
        losses=(losses / comm.size).tolist(),
        validation_losses=validation_losses,
        sent_bytes={
            kind: comm.total(kind=kind, label="step").sent_bytes / settings.steps
            for kind in ("all_to_all", "all_reduce", "all_gather")
        },
        held_bytes=held_bytes(model, optimizer),
        seconds={name: total / settings.steps for name, total in clock.seconds.items()},
        verdict=check_weights(model, optimizer.gather_master, comm) if settings.check else None,
    )


def warmup_and_cosine(
    optimizer: torch.optim.Optimizer, steps: int, lr: float
) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate of each of ``steps``: up to ``lr`` and down to a tenth of it."""
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP, total_iters=WARMUP)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, max(1, steps - WARMUP), eta_min=lr / 10
    )
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [WARMUP])


@torch.no_grad()
def validate(
    model: GPT, recipe: str, settings: Settings, corpus: Corpus, comm: Communicator
) -> float:
    """The mean loss on held-out files, nats a byte. Collective; each rank takes its share."""
    draw = torch.Generator().manual_seed(0)
    total = torch.zeros(1, dtype=torch.float64)
    for i in range(VALIDATION_BATCHES):
        inputs, targets = sample(corpus.validation, settings.batch, GPT.context, draw)
        if i % comm.size == comm.rank:
            with settings.region(recipe, comm):
                total += model(inputs, targets)
    comm.all_reduce_sum_(total)
    return total.item() / VALIDATION_BATCHES


def held_bytes(model: torch.nn.Module, optimizer: ZeroOptimizer) -> dict[str, int]:
    """What this rank holds between steps."""
    weights = 0
    for parameter in model.parameters():
        if isinstance(parameter, zerocast.QuantizedTensor):
            weights += sum(buffer.nbytes for buffer in parameter.quantized_storage.buffers.values())
        else:
            weights += parameter.nbytes
    held = {"weights": weights, "masters": 0, "optimizer_state": 0}
    for name, value in optimizer.state_dict()["state"].items():
        kind = {"master": "masters", "state": "optimizer_state"}.get(name.partition(".")[0])
        if kind is not None:
            held[kind] += value.nbytes
    return held


class Clock:
    """Adds up wall time by phase, waiting for slower ranks included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs within the context as ``name``."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start
