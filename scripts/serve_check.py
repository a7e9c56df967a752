"""Serves what zerocast exports by a real vLLM, and refits it while a trainer trains; without stubs.

    serve_check.py export DIRECTORY              trains a small Llama; exports it in every dialect
    serve_check.py serve DIRECTORY               loads each, compares probabilities, asks by HTTP
    serve_check.py live DIRECTORY                a server, and two ranks that train and feed it

A dialect that this platform cannot execute is listed with vLLM's message. Every dialect that it
executes must differ from transformers in FP32 on the dequantized weights by at most BOUND, in the
mean log probability of a prompt's tokens. Every engine is a process of its own,
``serve_check.py engine FOLDER RESULT [QUANTIZATION]``. Needs vLLM: scripts/serve_check.sh makes
the environment.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch

import zerocast
from zerocast.cli import stored_checksums
from zerocast.export import DIALECTS, load_pretrained, save_pretrained
from zerocast.export.dialects import LINEAR
from zerocast.refit import Receiver, Refit

BOUND = 0.004
"""The largest mean difference of log probabilities; BF16, which is not quantized, has 0.0025."""

MUST_RUN = ("bf16", "compressed-tensors/fp8-channel", "compressed-tensors/fp8-channel-vllm")
"""What vLLM executes on any x86 CPU with AVX-512."""

OTHERS = ("sglang/", "gpt-oss/", "mlx/", "deepseek/v4")
"""The dialects of other servers, or of models that are no Llama."""

ONLINE = "fp8_per_channel"
"""vLLM's scheme whose bytes are those of `compressed-tensors/fp8-channel-vllm`."""

STARTS = 1000
"""How often a server is asked whether it has started; other programs may use the machine."""

LIVE = "compressed-tensors/fp8-channel"
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
VERSIONS = {1: "whole", 2: "deltas", 3: "deltas", 4: "deltas", 5: "whole"}
TOKENS = torch.randint(3, 256, (4, 32), generator=torch.Generator().manual_seed(0))


# --- the trainer ---


def llama() -> torch.nn.Module:
    """A small one of transformers, BF16, whose layers are converted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    zerocast.nn.convert(model, "nvfp4", filter_fqns=["lm_head"])
    return model


def tokenizer() -> Any:
    """A word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2")


def step(model: torch.nn.Module, optimizer: Any) -> None:
    """Train on the prompts."""
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def export(directory: Path) -> None:
    """Write the model after 12 steps, in every dialect that vLLM reads of a Llama, and in BF16."""
    model = llama()
    optimizer = zerocast.optim.ZeroOptimizer(model.named_parameters(), lr=2e-3)
    for _ in range(12):
        step(model, optimizer)
    options: dict[str, Any] = {"optimizer": optimizer, "from_masters": True}
    for name, dialect in DIALECTS.items():
        # Static scales of inputs would have to be measured.
        if LINEAR in dialect.reads and not dialect.input_scale and not name.startswith(OTHERS):
            folder = directory / name.replace("/", "-")
            save_pretrained(model, folder, dialect=name, tokenizer=tokenizer(), **options)
    masters = {name: optimizer.gather_master(p) for name, p in model.named_parameters()}
    plain = type(model)(model.config).bfloat16()
    plain.load_state_dict({name: master.bfloat16() for name, master in masters.items()})
    plain.save_pretrained(directory / "bf16")
    tokenizer().save_pretrained(directory / "bf16")


# --- an engine ---


def make_engine(folder: Path, quantization: str | None = None) -> Any:
    """Return vLLM of a checkpoint, in this process."""
    from vllm import LLM

    return LLM(
        str(folder), enforce_eager=True, max_model_len=64, dtype="bfloat16", max_num_seqs=4, seed=0,
        quantization=quantization, block_size=TOKENS.shape[1],
    )  # fmt: skip


def answers(llm: Any) -> dict[str, Any]:
    """What it says of the prompts, and the checksums of its parameters."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": row} for row in TOKENS.tolist()]
    sampling = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, ignore_eos=True)
    found = llm.generate(prompts, sampling, use_tqdm=False)
    # Log probabilities of prompts are computed anew. These prompts begin with those, whose keys and
    # values are in the cache of prefixes.
    longer = [{"prompt_token_ids": row + row[:8]} for row in TOKENS.tolist()]
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    continued = llm.generate(longer, sampling, use_tqdm=False)
    assert {each.num_cached_tokens for each in continued} == {TOKENS.shape[1]}
    [parameters] = llm.apply_model(
        lambda model: Receiver(dict(model.named_parameters())).checksums()
    )
    return {
        "tokens": [list(each.outputs[0].token_ids) for each in found],
        "logprobs": [
            [each.prompt_logprobs[i][row[i]].logprob for i in range(1, len(row))]
            for each, row in zip(found, TOKENS.tolist(), strict=True)
        ],
        "continued": [
            [place[token].logprob for token, place in zip(out.token_ids, out.logprobs, strict=True)]
            for out in (each.outputs[0] for each in continued)
        ],
        "parameters": parameters,
    }


def engine(folder: Path, result: Path, quantization: str | None = None) -> None:
    """Write what a new engine says, or why there is none."""
    try:
        said = answers(make_engine(folder, quantization))
    except Exception as error:  # whatever vLLM refuses a platform with
        said = {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    result.write_text(json.dumps(said))


def asked(folder: Path, quantization: str | None = None) -> dict[str, Any]:
    """What an engine in a process of its own says."""
    result = folder.with_name(f"{folder.name}{quantization or ''}.json")
    result.unlink(missing_ok=True)
    arguments = [
        sys.executable,
        __file__,
        "engine",
        folder,
        result,
        *([quantization] if quantization else []),
    ]
    process = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if not result.exists():  # it died
        return {"refused": (process.stderr.strip().splitlines() or ["it died"])[-1]}
    said: dict[str, Any] = json.loads(result.read_text())
    return said


def expected(folder: Path) -> torch.Tensor:
    """The log probabilities of the prompts by transformers in FP32 on the dequantized weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        config = AutoConfig.from_pretrained(folder)
        del config.quantization_config
        model = LlamaForCausalLM(config).float()
        for name, weight in load_pretrained(folder).items():
            is_in_codes = isinstance(weight, zerocast.QuantizedTensor)
            value = weight.dequantize(torch.float32) if is_in_codes else weight
            model.get_parameter(name).data = value.float()
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        given = model(input_ids=TOKENS).logits.log_softmax(-1)[:, :-1]
    return given.gather(2, TOKENS[:, 1:, None])[..., 0]


def difference(given: list[list[float]], wanted: torch.Tensor | list[list[float]]) -> float:
    """Return the mean difference of log probabilities."""
    return float((torch.tensor(given) - torch.as_tensor(wanted)).abs().mean())


# --- over HTTP ---


def over_http(folder: Path) -> dict[str, Any]:
    """The same of vLLM's server, as `answers` has it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limits = "--enforce-eager --max-model-len 64 --max-num-seqs 4 --seed 0 --dtype bfloat16"
    where = f"--model {folder} --served-model-name served --host 127.0.0.1 --port {port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *f"{where} {limits}".split()],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(STARTS):
            assert server.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        else:
            raise TimeoutError(f"the server has not started in {STARTS} tries")
        asks = {
            "model": "served", "prompt": TOKENS.tolist(), "max_tokens": 8, "temperature": 0,
            "ignore_eos": True, "prompt_logprobs": 0, "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(asks).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            choices = sorted(json.load(answer)["choices"], key=lambda each: each["index"])
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)  # its engine, too
            server.wait()
    return {
        "tokens": [each["token_ids"] for each in choices],
        "text": choices[0]["text"],
        "logprobs": [
            [each["prompt_logprobs"][i][str(row[i])]["logprob"] for i in range(1, len(row))]
            for each, row in zip(choices, TOKENS.tolist(), strict=True)
        ],
    }


def serve(directory: Path) -> None:
    """Load, compare and ask over HTTP every folder; end if one is wrong or missing."""
    folders = {name: directory / name.replace("/", "-") for name in ("bf16", *DIALECTS)}
    found = {name: asked(folder) for name, folder in folders.items() if folder.is_dir()}
    wrong = [name for name in MUST_RUN if name not in found]
    for name, said in found.items():
        if "refused" in said:
            print(f"{name}: not executed here: {said['refused']}")
            wrong += [name] * (name in MUST_RUN)
            continue
        served, wanted = over_http(folders[name]), expected(folders[name])
        differences = [difference(each["logprobs"], wanted) for each in (said, served)]
        is_right = max(differences) <= BOUND and served["tokens"] == said["tokens"]
        texts = " and ".join(f"{each:.4f}" for each in differences)
        ending = f"{served['text']!r}: {'ok' if is_right else 'WRONG'}"
        print(f"{name}: {texts} over HTTP, which answers {ending}")
        wrong += [] if is_right else [name]
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")
    online, codes = asked(folders["bf16"], ONLINE), found[f"{LIVE}-vllm"]
    moved = difference(online["logprobs"], codes["logprobs"])
    print(f"{ONLINE}, quantized by vLLM from BF16: {moved:.5f} from the codes of zerocast")
    assert moved <= BOUND


# --- a live server ---


def train(directory: Path, rank: int) -> None:
    """One of two ranks: every second step its weights are sent and exported, and it trains on."""
    torch.distributed.init_process_group(
        "gloo", f"file://{directory / 'ranks'}", rank=rank, world_size=2
    )
    model = llama()
    optimizer = zerocast.optim.ZeroOptimizer(model.named_parameters(), lr=2e-3)
    options: dict[str, Any] = {"optimizer": optimizer, "from_masters": True}
    save_pretrained(model, directory / "0", dialect=LIVE, tokenizer=tokenizer(), **options)
    refit = Refit(model, LIVE, bucket_bytes=1 << 17, **options)
    server = Client(str(directory / "socket")) if rank == 0 else None
    for version, form in VERSIONS.items():
        for _ in range(2):
            step(model, optimizer)
        since = refit.version or None
        for name, tensor in refit.named_tensors() if form == "whole" else refit.deltas(since):
            if server is not None:
                plain = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                server.send(
                    (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), plain)
                )
        checksums = refit.checksums()
        if server is not None:
            server.send(checksums)
            print(f"trained and sent version {version} at {time.monotonic():.2f}")
        save_pretrained(
            model, directory / str(version), dialect=LIVE, tokenizer=tokenizer(), **options
        )
    torch.distributed.destroy_process_group()


class Sent:
    """The tensors of one version, as they arrive; afterwards the trainer's checksums."""

    def __init__(self, trainer: Connection) -> None:
        self.trainer, self.checksums = trainer, dict[str, str]()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while isinstance(given := self.trainer.recv(), tuple):
            name, dtype, shape, plain = given
            yield name, torch.frombuffer(bytearray(plain), dtype=getattr(torch, dtype)).view(shape)
        self.checksums = given


def load(llm: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give the engine new weights, and let it forget what it computed with the old ones."""
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
    assert llm.reset_prefix_cache(), "a request is running"


def refitted_engine(folder: Path, trainer: Connection) -> dict[int, dict[str, Any]]:
    """Return what an engine of ``folder`` says after each version, with the checksums of it."""
    llm, receiver, loaded = make_engine(folder), Receiver(), 0
    said = {0: answers(llm)}
    for version, form in VERSIONS.items():
        sent = Sent(trainer)
        if form == "whole":
            load(llm, sent)
        else:
            for name, delta in sent:
                receiver.apply_delta(name, delta)
            assert receiver.checksums() == sent.checksums, "received other bytes than were sent"
            changed, loaded = receiver.changed_since(loaded, PACKED), receiver.applied
            load(llm, changed.items())
        print(f"loaded version {version}, {form}, at {time.monotonic():.2f}")
        said[version] = answers(llm) | {"checksums": sent.checksums}
    return said


def live(directory: Path) -> None:
    """Refit an engine five times; compare it with new ones of the exports of the same steps."""
    listener = Listener(str(directory / "socket"))
    command = [sys.executable, "-u", __file__, "train", str(directory)]
    ranks = [subprocess.Popen([*command, rank]) for rank in "01"]
    try:
        said = refitted_engine(directory / "0", listener.accept())
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    for version, refitted in said.items():
        fresh = asked(directory / str(version))
        for part in ("parameters", "tokens", "logprobs", "continued"):
            assert fresh[part] == refitted[part], (
                f"version {version}: {part} of a new engine differ"
            )
        if version:
            stored = stored_checksums.checksums(directory / str(version))
            assert stored == refitted["checksums"], (
                f"version {version}: the export has other bytes than were sent"
            )
        moved = difference(refitted["logprobs"], said[max(version - 1, 0)]["logprobs"])
        print(
            f"version {version}: {len(fresh['parameters'])} parameters equal; moved by {moved:.4f}",
        )


def main(command: str, directory: str, *others: str) -> None:
    """Run a part."""
    folder = Path(directory).absolute()
    if command == "engine":
        engine(folder, Path(others[0]), *others[1:])
    elif command == "train":
        train(folder, int(others[0]))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        {"export": export, "serve": serve, "live": live}[command](folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
