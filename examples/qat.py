"""Continue a transformers model in the bytes that a server will load, and compare with casting it.

    python examples/qat.py --seeds 0 1 2 --check                           # one rank
    torchrun --nproc-per-node 2 examples/qat.py --recipes nvfp4 --modes weights
    python examples/qat.py --model qwen3-moe --recipes nvfp4 mxfp4 --modes weights

A model is made from a configuration and trained on text in high precision, once a seed. What is
compared begins from these weights, the start, under FSDP2, with as many further steps on the same
text:

    BF16         nothing is quantized
    PTC          a post-training cast of the start, without steps
    QAD          quantization-aware distillation: the weights that a forward multiplies are codes,
                 and the loss is the KL divergence from the logits of the start
    PTC of BF16  a post-training cast of what BF16 ends with
    QAT          quantization-aware training: the same codes, and the loss of the text

It ends with a table of validation losses, and leaves a JSON record, a picture and the exported
models in ``--out``. What is in the record is not run again, so the same command continues after a
kill; only the start is trained again. With ``--check`` each export is loaded again and its values
are compared with those that the last forward multiplied, bit for bit; the exit code is 1 where one
differs. It needs transformers and safetensors beside the extra [examples].
"""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
from gpt.data import load_corpus, sample
from gpt.launch import fast_dtype, launched_process_group
from gpt.training import MAX_NORM, warmup_and_cosine
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import zerocast
from zerocast.comm import Communicator
from zerocast.export import load_pretrained, save_pretrained

CONTEXT, BATCH, VALIDATION_BATCHES = 128, 8, 16
"""Bytes of a sequence, sequences of a batch over all ranks, batches of a validation."""

PRETRAINING_LR, LR = 3e-3, 5e-4  # at their highest

SHAPE = {
    "hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
    "vocab_size": 256, "use_cache": False, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MODELS = {"llama": LlamaConfig(**SHAPE), "qwen3-moe": Qwen3MoeConfig(**SHAPE, **EXPERTS)}

RECIPES = {
    "nvfp4": (zerocast.NVFP4BlockScaling(), "compressed-tensors/nvfp4"),
    "nvfp4-1x16": ("nvfp4-1x16", "compressed-tensors/nvfp4"),
    "mxfp4": (zerocast.MXFP4BlockScaling(scale_rounding="even"), "compressed-tensors/mxfp4"),
    "fp8": (zerocast.Float8CurrentScaling(), "compressed-tensors/fp8-tensor"),
}
"""By name how weights are stored, and the dialect of the export."""

REFERENCE = {"PTC": "start", "QAD": "start", "PTC of BF16": "BF16", "QAT": "BF16"}
"""By method what its loss is compared with: what was cast, or had the same loss and steps."""


Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """One row of the record: ``mode`` is "weights" only (W4A16), or "activations" and gradients,
    too (W4A4).
    """

    model: str
    seed: int
    method: str
    recipe: str = ""
    mode: str = ""


@dataclass(frozen=True)
class Score:
    """On held-out text: the loss and the KL divergence from the start, in nats a byte; and how many
    bytes of the export were compared.
    """

    loss: float
    kl: float
    compared: int = 0


class Bench:
    """What all jobs of one seed share."""

    def __init__(self, arguments: Namespace, seed: int, comm: Communicator, bar: tqdm) -> None:
        self.arguments, self.seed, self.comm, self.bar = arguments, seed, comm, bar
        self.corpus, self.dtype = load_corpus(), fast_dtype(comm)
        self.states: dict[str, Values] = {}  # whole FP32 weights, trained in high precision
        plans = ("start", arguments.pretrain, PRETRAINING_LR), ("BF16", arguments.steps, LR)
        for method, steps, lr in plans:
            model = self.sharded(self.plain(self.states.get("start"), torch.float32))
            self.train(model, Job(arguments.model, seed, method), steps, lr)
            options = StateDictOptions(full_state_dict=True)
            self.states[method] = get_model_state_dict(model, options=options)
        self.teacher = [logits for logits, _ in self.answers(self.plain(self.states["start"]))]

    # --- models ---

    def plain(self, state: Values | None, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """A model of transformers with these values, or initialized by the seed."""
        torch.manual_seed(self.seed)
        config = MODELS[self.arguments.model]
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or self.dtype)
        if state is not None:
            model.load_state_dict(state)
        return model

    def converted(self, state: Values, recipe: str, weights: str) -> torch.nn.Module:
        """One whose linear layers and experts are quantized, but for the output layer."""
        model = self.plain(state, torch.float32 if weights == "master" else None)
        include = ["*.mlp.experts"] if self.arguments.model == "qwen3-moe" else []
        left = {"filter_fqns": ["lm_head"], "strict": True}
        zerocast.nn.convert(model, RECIPES[recipe][0], weights=weights, include=include, **left)
        return model

    def sharded(self, model: torch.nn.Module) -> torch.nn.Module:
        """FP32 masters, sharded; a forward multiplies what FSDP2 gathers of them."""
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    def region(self, job: Job) -> AbstractContextManager[object]:
        """Where forwards run."""
        if job.mode != "activations":
            return nullcontext()
        return zerocast.autocast(recipe=RECIPES[job.recipe][0], amax_reduction_group=self.comm)

    # --- training and validation ---

    def train(self, model: torch.nn.Module, job: Job, steps: int, lr: float) -> None:
        """Steps of torch's AdamW on text that all methods share."""
        teacher = None
        if job.method == "QAD":  # sharded as the student is, and never stepped
            whole = self.plain(self.states["start"], torch.float32)
            teacher = self.sharded(whole.requires_grad_(False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        schedule = warmup_and_cosine(optimizer, steps, lr)
        ranks, text = self.comm.size, 2 * self.seed + (job.method != "start")
        draw = torch.Generator().manual_seed(text * ranks + self.comm.rank)
        self.bar.set_description(f"seed {self.seed} {job.method} {job.recipe} {job.mode}")
        for _ in range(steps):
            inputs, targets = sample(self.corpus.training, BATCH // ranks, CONTEXT, draw)
            with self.region(job):
                logits = model(input_ids=inputs).logits.float()
            with torch.no_grad():
                wanted = teacher and teacher(input_ids=inputs).logits.float()
            loss = divergence(logits, wanted) if teacher else cross_entropy(logits, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if job.recipe:
                zerocast.sharded.precompute_scales_for_fsdp(model)
            self.bar.set_postfix_str(f"loss {loss.item():.4f}", refresh=False)
            self.bar.update()

    @torch.no_grad()
    def answers(self, model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Logits, FP32 [sequences, time, 256], and targets of this rank's part of held-out text."""
        draw = torch.Generator().manual_seed(0)
        for _ in range(VALIDATION_BATCHES):
            text = sample(self.corpus.validation, BATCH, CONTEXT, draw)
            inputs, targets = (each[self.comm.rank :: self.comm.size] for each in text)
            yield model(input_ids=inputs).logits.float(), targets

    def score(self, model: torch.nn.Module, job: Job) -> Score:
        """Mean over the held-out text. Collective."""
        total = torch.zeros(2, dtype=torch.float64)
        with self.region(job):
            for (logits, targets), wanted in zip(self.answers(model), self.teacher, strict=True):
                total += torch.stack((cross_entropy(logits, targets), divergence(logits, wanted)))
        self.comm.all_reduce_sum_(total)
        return Score(*(total / (VALIDATION_BATCHES * self.comm.size)).tolist())

    def input_amaxes(self, model: torch.nn.Module, job: Job) -> dict[str, float]:
        """By linear layer, the largest magnitude that it multiplies. Collective."""
        found: dict[str, float] = {}

        def note(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            found[layer.name] = max(inputs[0].abs().max().item(), found.get(layer.name, 0.0))

        layers = [each for each in model.modules() if isinstance(each, zerocast.nn.Linear)]
        hooks = [layer.register_forward_pre_hook(note) for layer in layers]
        self.score(model, job)
        for hook in hooks:
            hook.remove()
        ranks = self.comm.all_gather_object(found)
        return {name: max(rank[name] for rank in ranks) for name in found}

    # --- jobs ---

    def run(self, job: Job) -> Score:
        """Train as ``job`` says, validate and export. Collective."""
        state = self.states["BF16" if "BF16" in job.method else "start"]
        if not job.recipe:
            return self.score(self.plain(state), job)
        if "PTC" in job.method:
            return self.score(self.converted(state, job.recipe, "quantized"), job)
        model = self.sharded(self.converted(state, job.recipe, "master"))
        self.train(model, job, self.arguments.steps, LR)
        score = self.score(model, job)
        return Score(score.loss, score.kl, self.export(model, job, score.loss))

    def export(self, model: torch.nn.Module, job: Job, loss: float) -> int:
        """Write what a server loads; how many bytes of it were compared. Collective."""
        folder = self.arguments.out / "-".join(map(str, asdict(job).values()))
        if self.comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        self.comm.barrier()
        dialect, options = RECIPES[job.recipe][1], {}
        # Of experts the example does not know the inputs.
        if job.mode == "activations" and dialect.endswith("/nvfp4") and job.model == "llama":
            dialect, amaxes = f"{dialect}-w4a4", self.input_amaxes(model, job)
            options["input_scales"] = {name: 2688 / amax for name, amax in amaxes.items()}
        save_pretrained(model, folder, dialect=dialect, dtype=self.dtype, **options)
        if not self.arguments.check:
            return 0
        trained, read = multiplied(model), in_stacks(folder, model, self.dtype)
        for name, value in trained.items():
            if not torch.equal(value.view(torch.uint8), read[name].view(torch.uint8)):
                raise SystemExit(f"WRONG: {job}: {name} is not what the last forward multiplied")
        if job.mode == "weights" and self.score(self.plain(read), job).loss != loss:
            raise SystemExit(f"WRONG: {job}: transformers has another loss with these weights")
        return sum(value.nbytes for value in trained.values())


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss of the next byte, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def divergence(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean over bytes of KL(teacher || student), in nats; ``wanted`` are a teacher's logits."""
    own, other = (each.flatten(0, 1).log_softmax(-1) for each in (logits, wanted))
    return F.kl_div(own, other, log_target=True, reduction="batchmean")


def value_of(weight: torch.Tensor) -> torch.Tensor:
    """What its codes stand for; of a plain tensor, itself."""
    return weight.dequantize() if isinstance(weight, zerocast.QuantizedTensor) else weight.detach()


def multiplied(model: torch.nn.Module) -> Values:
    """The values that a forward of the sharded ``model`` multiplies, whole on every rank."""
    for module in (*model.model.layers, model):
        module.unshard()
    return {name: value_of(weight) for name, weight in model.named_parameters()}


def in_stacks(folder: Path, model: torch.nn.Module, dtype: torch.dtype) -> Values:
    """The values of an export by the names in the model, which keeps in two stacks what a file has
    as three projections of each expert.
    """
    read = {name: value_of(each) for name, each in load_pretrained(folder, dtype=dtype).items()}
    projections = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    for name, parameter in model.named_parameters():
        if name not in read:
            experts, _, stack = name.rpartition(".")
            read[name] = torch.stack([
                torch.cat([read.pop(f"{experts}.{e}.{each}.weight") for each in projections[stack]])
                for e in range(parameter.shape[0])
            ])  # fmt: skip
    return read


# --- what is run, and what it leaves ---


def jobs(arguments: Namespace) -> Iterator[Job]:
    """Seed by seed."""
    for seed in arguments.seeds:
        yield from (Job(arguments.model, seed, method) for method in ("start", "BF16"))
        for recipe, mode in product(arguments.recipes, arguments.modes):
            for method in REFERENCE:
                yield Job(arguments.model, seed, method, recipe, mode)


def report(arguments: Namespace, results: dict[Job, Score]) -> None:
    """Print the table, and draw its bars: mean and standard deviation over seeds."""

    def of(method: str, *case: str) -> list[Score]:
        every = [Job(arguments.model, seed, method, *case) for seed in arguments.seeds]
        return [results[job] for job in every if job in results]

    figure = Figure(figsize=(11, 5), layout="constrained")
    axes, bars = figure.subplots(), {}
    heads = (f"{method}\nabove {reference}" for method, reference in REFERENCE.items())
    table = Table("recipe", "quantized", *heads, title=f"{arguments.model}: loss, nats a byte")
    cases = list(product(arguments.recipes, arguments.modes))
    for place, case in enumerate(cases):
        cells = ["-"] * len(REFERENCE)
        for i, (method, reference) in enumerate(REFERENCE.items()):
            above = [a.loss - b.loss for a, b in zip(of(method, *case), of(reference))]  # noqa: B905
            if above:
                error = stdev(above) if len(above) > 1 else float("nan")
                kl = mean(score.kl for score in of(method, *case))
                cells[i] = f"{mean(above):+.4f} ± {error:.4f}\nKL {kl:.4f}"
                color = colormaps["Dark2"](i)  # other colours than those of recipes elsewhere
                bars[method] = axes.bar(place + i / 5, mean(above), 0.2, yerr=error, color=color)
                box = {"facecolor": "white", "linewidth": 0, "pad": 1}
                axes.bar_label(bars[method], fmt="{:+.3f}", padding=3, size="x-small", bbox=box)
        table.add_row(*case, *cells)
    axes.set_xticks([i + 0.3 for i in range(len(cases))], ["\n".join(case) for case in cases])
    axes.set(
        ylabel="validation loss above the reference (nats a byte)",
        title=f"{arguments.model}, {arguments.pretrain} steps in high precision and "
        f"{arguments.steps} of each method, mean of {len(arguments.seeds)} seeds",
    )
    heads = [f"{method}, above {REFERENCE[method]}" for method in bars]
    figure.legend(bars.values(), heads, loc="outside lower center", ncols=len(bars))
    figure.savefig(arguments.out / "qat.png", dpi=120)
    Console(width=120).print(table)
    losses = [mean(score.loss for score in of(method)) for method in ("start", "BF16")]
    print("Losses of start and BF16: {:.4f} and {:.4f} nats a byte".format(*losses))


def parse_arguments() -> Namespace:
    """The command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    trained, modes = ["nvfp4", "nvfp4-1x16", "mxfp4"], ["weights", "activations"]
    parser.add_argument("--model", choices=list(MODELS), default="llama")
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=trained)
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--pretrain", type=int, default=500, help="steps in high precision, first")
    parser.add_argument("--steps", type=int, default=120, help="further steps")
    parser.add_argument("--check", action="store_true", help="load exports, and compare the values")
    parser.add_argument("--out", type=Path, default=Path("runs/qat"), help="a folder of all ranks")
    return parser.parse_args()


def main() -> None:
    """Run what is not in the record yet; then report."""
    arguments = parse_arguments()
    with launched_process_group() as comm:
        if BATCH % comm.size:
            raise SystemExit(f"{comm.size} ranks must divide a batch of {BATCH} sequences")
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / "record.json"
        settings = [arguments.pretrain, arguments.steps, comm.size]
        record = json.loads(path.read_text()) if path.exists() else {"runs": []}
        record = comm.all_gather_object(record)[0]
        if record.setdefault("pretrain, steps, ranks", settings) != settings:
            raise SystemExit(f"{path} is of another {settings}; give another --out")
        results = {Job(**each["job"]): Score(**each["score"]) for each in record["runs"]}
        todo, bench = [job for job in jobs(arguments) if job not in results], None
        steps = len({job.seed for job in todo}) * (arguments.pretrain + arguments.steps)
        steps += arguments.steps * sum(job.method in ("QAT", "QAD") for job in todo)
        with tqdm(total=steps, disable=comm.rank > 0, mininterval=1.0) as bar:
            for job in todo:
                if bench is None or bench.seed != job.seed:
                    bench = Bench(arguments, job.seed, comm, bar)
                results[job] = bench.run(job)
                if comm.rank == 0:
                    record["runs"].append({"job": asdict(job), "score": asdict(results[job])})
                    path.write_text(json.dumps(record, indent=1))
        if comm.rank == 0:
            report(arguments, results)
            compared = sum(results[job].compared for job in jobs(arguments))
            print(f"The exports hold what was trained with: {compared:,} bytes compared.")
            print(f"Record, picture and exports: {arguments.out}")


if __name__ == "__main__":
    main()
