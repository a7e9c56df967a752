"""What fuzz.py feeds: everything that is read, and what Python lets through to the native library.

A target is made once a process, and called with a generator of random numbers for each input. It
reads or casts one input that is changed somewhere, uses what was accepted, and asserts what then
holds. Being refused by an error of :mod:`zerocast.errors` is as good; anything else is a finding.
"""

import contextlib
import copy
import dataclasses
import io
import json
import os
import random
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fuzz_directories import (
    Comparisons,
    Conversions,
    Exports,
    use,
    with_header,
)
from fuzz_mutations import (
    JSON,
    ODD,
    changed,
    changed_bytes,
    has_memory,
    odd_tensor,
    times,
)

import zerocast
from tests.optim.training import Training
from tests.support.recipes import RECIPES, VARIANTS
from tests.support.same_bytes import assert_same_storage
from tests.support.values import KINDS, draw_values
from zerocast.backends.reference.digest_formula import as_integers
from zerocast.checkpoint import load, save
from zerocast.checkpoint.manifest import NAME, _digest
from zerocast.cli.checkpoint_files import entries
from zerocast.cli.reproduce import reproduce
from zerocast.comm import Communicator, SingleRank, run_in_process
from zerocast.errors import VerificationError, ZerocastError
from zerocast.layout import Source
from zerocast.nn.saved_state import pack, unpack
from zerocast.numerics import Comparison
from zerocast.recipes import NOMINAL_DTYPES, QParams, Recipe, as_recipe, recipe_from_text
from zerocast.recipes import RECIPES as SCHEMES
from zerocast.refit import Receiver
from zerocast.refit.delta import changed_segments, packed, whole_segment
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.digest import digest
from zerocast.tensors.saved_storage import reduce_storage, restore_storage

Target = Callable[[random.Random], None]


def values(seed: int, shape: tuple[int, int] = (32, 64)) -> torch.Tensor:
    """FP32, some of them not finite."""
    kind = KINDS[seed % len(KINDS)]
    return draw_values(kind, shape[0] * shape[1], seed).view(shape)


# --- quantized tensors ---


class Weights:
    """The fields of a saved weight, as unpickling hands them over."""

    def __init__(self, folder: Path) -> None:
        given = {n: r for n, r in VARIANTS.items() if n != "delayed-function"}
        self._saved = [
            reduce_storage(zerocast.quantize(values(0), recipe).quantized_storage)[1]
            for recipe in given.values()
        ]

    def __call__(self, draw: random.Random) -> None:
        fields = list(draw.choice(self._saved))
        fields[3] = {name: buffer.clone() for name, buffer in fields[3].items()}
        for _ in times(draw):
            fields = changed(fields, draw)
        if not isinstance(fields, list) or len(fields) not in (6, 7):
            return
        use(QuantizedTensor(restore_storage(*fields)))


class SavedFiles:
    """Files of torch.save, read with ``weights_only=True``, and by ``inspect``."""

    def __init__(self, folder: Path) -> None:
        self._path, self._files = folder / "weights.pt", list[bytes]()
        for recipe in RECIPES.values():
            for kind in (lambda w: w, torch.nn.Parameter):
                stream = io.BytesIO()
                torch.save({"w": kind(zerocast.quantize(values(0), recipe))}, stream)
                self._files.append(stream.getvalue())

    def __call__(self, draw: random.Random) -> None:
        data = draw.choice(self._files)
        if draw.random() < 0.7:  # the pickle inside, the archive around it whole
            made = io.BytesIO()
            with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
                for name in old.namelist():
                    content = old.read(name)
                    is_pickle = name.endswith("data.pkl")
                    new.writestr(name, changed_bytes(content, draw) if is_pickle else content)
            data = made.getvalue()
        else:
            data = changed_bytes(data, draw)
        if draw.random() < 0.2:
            self._path.write_bytes(data)
            list(entries(self._path))
            return
        try:
            loaded = torch.load(io.BytesIO(data), weights_only=True)
        except ZerocastError:
            raise
        except Exception as error:
            ours = [f for f in traceback.extract_tb(error.__traceback__) if "zerocast/" in f[0]]
            if any("/scripts/" not in frame.filename for frame in ours):
                raise
            return  # torch refused it before any code of zerocast ran
        found = loaded.get("w") if isinstance(loaded, dict) else loaded
        if isinstance(found, QuantizedTensor):
            use(found)


# --- trainings ---


class Checkpoints:
    """The manifest and the files of a checkpoint, a directory and a single file."""

    def __init__(self, folder: Path) -> None:
        self._training = self._make()
        self._training.train(0, 1)
        self._masters = [m.clone() for m in self._training.masters()]
        self._path, self._one = folder / "run", folder / "run.safetensors"
        save(self._path, self._training.optimizer, extra={"epoch": (1, {2: 3.5})})
        save(self._one, self._training.optimizer)
        self._files = {path: path.read_bytes() for path in [*self._path.iterdir(), self._one]}
        self._given = json.loads(self._files[self._path / NAME])

    @staticmethod
    def _make() -> Training:
        return Training(recipe=RECIPES["delayed"])

    def __call__(self, draw: random.Random) -> None:
        action, read = draw.random(), self._path
        if action < 0.7:
            written, given = self._path / NAME, self._given
            for _ in times(draw):
                part = {"content": given["content"]} if draw.random() < 0.9 else given
                part = changed(part, draw, JSON)
                given = given | part if isinstance(part, dict) and "content" in part else part
                if not isinstance(given, dict) or "content" not in given:
                    break
            if isinstance(given, dict) and isinstance(given.get("content"), dict):
                given = given | {"digest": _digest(given["content"])}
            data = json.dumps(given).encode()
        else:
            written = draw.choice(list(self._files))
            read = self._one if written == self._one else self._path
            data = changed_bytes(self._files[written], draw)
        written.write_bytes(data)
        try:
            load(read, self._training.optimizer)
        except ZerocastError:
            if draw.random() < 0.05:
                now = self._training.masters()
                assert all(map(torch.equal, now, self._masters)), "a refused load changed masters"
            raise
        else:
            optimizer, self._training = self._training, self._make()
            load_good = self._files[written]
            written.write_bytes(load_good)
            load(self._path, self._training.optimizer)
            optimizer.train(2)
        finally:
            written.write_bytes(self._files[written])


class States:
    """The state dict of a ZeroOptimizer."""

    def __init__(self, folder: Path) -> None:
        self._training = Training(recipe=RECIPES["delayed"])
        self._training.train(0, 1)
        self._state = copy.deepcopy(self._training.optimizer.state_dict())

    def __call__(self, draw: random.Random) -> None:
        state: Any = dict(self._state)
        for _ in times(draw):
            state = changed(state, draw)
        training = self._training
        try:
            training.optimizer.load_state_dict(state)
        except ZerocastError:
            raise
        else:
            self._training = Training(recipe=RECIPES["delayed"])
            self._training.train(0)
            training.train(2)


class LayerStates:
    """What a layer keeps of its recipe, as one tensor of bytes."""

    def __init__(self, folder: Path) -> None:
        recipe = RECIPES["delayed"]
        state = {"scale": torch.ones(3), "amax_history": torch.zeros(4, 3)}
        self._packed = pack({"recipe": recipe.text, "roles": [1, 2]}, state)

    def __call__(self, draw: random.Random) -> None:
        data: Any = changed_bytes(bytes(self._packed.tolist()), draw)
        if draw.random() < 0.5:  # the header alone, of the right length
            size = int.from_bytes(self._packed[:8].tolist(), "little")
            header = json.loads(bytes(self._packed[8 : 8 + size].tolist()))
            for _ in times(draw):
                header = changed(header, draw, JSON)
            text = json.dumps(header).encode()
            data = len(text).to_bytes(8, "little") + text
            data += bytes(self._packed[8 + size :].tolist())
        data = torch.frombuffer(bytearray(data or b"x"), dtype=torch.uint8)
        unpack(odd_tensor(data, draw) if draw.random() < 0.2 else data, "layer")


# --- weights that are sent, exported, reproduced ---


class Deltas:
    """Deltas of a refit, damaged on their way, or sealed by somebody who means it."""

    def __init__(self, folder: Path) -> None:
        self._pairs = []
        for dtype, count in ((torch.uint8, 4000), (torch.float32, 40)):
            old = torch.arange(count).remainder(251).to(dtype)
            new = old.clone()
            new[3:9] += 1
            new[count // 2 :: 7] += 2
            size = {"shape": (count // 4, 4), "dtype": dtype}
            whole = packed([whole_segment(old)], since=None, version=5, total=int(digest(old)),
                           **size)  # fmt: skip
            half = count // 2
            parts = changed_segments([
                Comparison(as_integers(old[a:b].clone()), as_integers(new[a:b]), a)
                for a, b in ((0, half), (half, count))
            ])[0]  # fmt: skip
            delta = packed(parts, since=5, version=6, total=int(digest(new)), **size)
            self._pairs.append((whole, delta))

    def __call__(self, draw: random.Random) -> None:
        whole, delta = draw.choice(self._pairs)
        receiver = Receiver()
        receiver.apply_delta("w", whole)
        before = receiver.tensors["w"].clone()
        made: Any = draw.choice((whole, delta)).clone()
        if draw.random() < 0.2:
            made = odd_tensor(made, draw)
        elif draw.random() < 0.6:
            words = made[: made.nbytes // 8 * 8].view(torch.int64)
            for _ in times(draw):
                odd = draw.choice([each for each in ODD if type(each) is int])
                near = int(words[draw.randrange(14)]) + draw.choice((-1, 1, 3, 10**9))
                word = draw.choice((odd, near)) % 2**64
                words[draw.randrange(min(20, len(words)))] = word - (word >= 2**63) * 2**64
        else:
            data = changed_bytes(bytes(made.tolist()), draw)
            made = torch.frombuffer(bytearray(data or b"x"), dtype=torch.uint8)
        plain = has_memory(made) and (made.dtype, made.dim()) == (torch.uint8, 1)
        if plain and made.numel() >= 88 and draw.random() < 0.8:  # sealed
            made = made.resolve_neg().clone().contiguous()
            made[40:48] = torch.tensor([made.nbytes]).view(torch.uint8)
            made[32:40] = 0
            made[32:40] = digest(made).view(1).view(torch.uint8)
        try:
            receiver.apply_delta("w", made)
        except ZerocastError:
            assert torch.equal(receiver.tensors["w"], before), "a refused delta was written"
            raise
        receiver.check()
        as_integers(receiver.tensors["w"])


class FaultFiles:
    """What ``verify`` leaves, and ``python -m zerocast reproduce`` repeats."""

    def __init__(self, folder: Path) -> None:
        os.chdir(folder)
        self._path, self._files = folder / "fault.safetensors", list[bytes]()
        for recipe in RECIPES.values():
            weight = zerocast.empty((33, 64), recipe)
            plan = zerocast.CastPlan([weight], [values(0, (33, 64)).view(-1)], [0], SingleRank(),
                                     verify="full")  # fmt: skip
            plan.cast()
            plan.all_gather()
            weight.quantized_storage.buffers["rowwise_data"].view(-1)[3] ^= 1
            try:
                plan.verify()
            except VerificationError:
                (left,) = folder.glob("zerocast-fault*")
                self._files.append(left.read_bytes())
                left.unlink()

    def __call__(self, draw: random.Random) -> None:
        data = draw.choice(self._files)
        if draw.random() < 0.7:
            data = with_header(data, draw)
        else:
            data = changed_bytes(data, draw)
        self._path.write_bytes(data)
        reproduce(self._path)


class Texts:
    """Names, texts and fields of recipes."""

    def __init__(self, folder: Path) -> None:
        own = [r for r in VARIANTS.values() if not callable(getattr(r, "amax_compute_algo", None))]
        self._texts = [recipe.text for recipe in own]

    def __call__(self, draw: random.Random) -> None:
        match draw.randrange(5):
            case 0:
                as_recipe(changed(draw.choice(list(SCHEMES)), draw))
            case 1 | 2:
                text: Any = draw.choice(self._texts)
                if draw.random() < 0.5:
                    text = json.dumps(changed(json.loads(text), draw, JSON))
                else:
                    text = changed_bytes(text.encode(), draw).decode(errors="replace")
                self._use(recipe_from_text(text), draw)
            case _:
                kind: Any = draw.choice(list(SCHEMES.values()))
                fields = {f.name: getattr(kind(), f.name) for f in dataclasses.fields(kind)}
                name = draw.choice(list(fields))
                if isinstance(fields[name], QParams):
                    key, old = draw.choice(list(vars(fields[name]).items()))
                    given: Any = QParams(**{key: changed(old, draw)})
                else:
                    given = changed(fields[name], draw)
                self._use(kind(**{name: given}), draw)

    @staticmethod
    def _use(recipe: Recipe, draw: random.Random) -> None:
        x = values(draw.randrange(100))
        weight = zerocast.quantize(x, recipe)
        weight.dequantize()
        if draw.random() < 0.05:
            with zerocast.use_backend("reference"):
                expected = zerocast.quantize(x, recipe)
            assert_same_storage(weight, expected, f"{recipe}")


# --- what Python lets through to the native library ---


class Casts:
    """Plans and casts of weights and masters of any shape, dtype, stride and offset: what is not
    refused has the bytes of ``quantize``, and nothing beside the buffers is written.
    """

    ROWS = (0, 1, 2, 3, 15, 16, 17, 31, 33, 64, 127, 130)
    COLS = (0, 1, 7, 16, 32, 33, 48, 64, 96, 128, 160, 272)

    def __init__(self, folder: Path) -> None:
        self._recipes = [r for n, r in VARIANTS.items() if n != "delayed-function"]

    def __call__(self, draw: random.Random) -> None:
        recipe, shape = draw.choice(self._recipes), (draw.choice(self.ROWS), draw.choice(self.COLS))
        dtype, of_master = draw.choice(NOMINAL_DTYPES), draw.choice(NOMINAL_DTYPES)
        seed, kind = draw.randrange(1000), draw.choice(KINDS)
        numel, columnwise = shape[0] * shape[1], draw.random() < 0.8
        if recipe.columnwise_source is Source.TRANSPOSED_MASTER:
            columnwise = False
        whole = draw_values(kind, numel + 3, seed).to(of_master)[draw.randrange(4) :][:numel]
        if draw.random() < 0.3:
            self._quantize(odd_tensor(whole.view(shape), draw), recipe)
            return
        weight = zerocast.empty(shape, recipe, dtype=dtype, columnwise=columnwise, name="w")
        codes, places = self._move(weight, draw)
        if draw.random() < 0.1 and numel:
            cut = draw.randrange(numel + 1)
            run_in_process(2, lambda comm: self._cast(comm, draw, weight, whole, cut, honest=True))
        else:
            self._cast(SingleRank(), draw, weight, whole, numel, honest=draw.random() < 0.5)
        beside = torch.ones(len(codes), dtype=torch.bool)
        for start, end in places:
            beside[start:end] = False
        assert bool((codes[beside] == 0x5A).all()), "bytes beside the codes were written"

    def _quantize(self, x: Any, recipe: Recipe) -> None:
        """Any strides, or refused."""
        made = zerocast.quantize(x, recipe)
        if made.device.type == "cpu" and not isinstance(x, QuantizedTensor):
            plain = x.detach().resolve_neg().contiguous().clone()
            assert_same_storage(made, zerocast.quantize(plain, recipe), f"strides {x.stride()}")
            made.dequantize()

    def _move(
        self, weight: QuantizedTensor, draw: random.Random
    ) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Let codes lie anywhere in a buffer."""
        storage = weight.quantized_storage
        sizes = [each.numel() for each in storage.codes]
        at, places = draw.randrange(5), []
        for size in sizes:
            places.append((at, at + size))
            at += size + draw.randrange(4)
        buffer = torch.full((at + 64,), 0x5A, dtype=torch.uint8)
        if draw.random() < 0.6:
            slices = [buffer[start:end] for start, end in places]
            zerocast.replace_raw_data(weight, *slices)
            return buffer, places
        return buffer, []

    def _cast(
        self,
        comm: Communicator,
        draw: random.Random,
        weight: QuantizedTensor,
        whole: torch.Tensor,
        cut: int,
        *,
        honest: bool,
    ) -> None:
        if comm.size > 1 and comm.rank > 0:
            storage = weight.quantized_storage
            weight = zerocast.empty(storage.shape, weight.recipe, dtype=weight.dtype, name="w",
                                    columnwise=storage.has_columnwise)  # fmt: skip
        start, end = ((0, cut), (cut, whole.numel()))[comm.rank]
        master = whole[start:end].clone() if end > start else None
        arguments: dict[str, Any] = {
            "model_weights": [weight], "master_weights": [master],
            "start_offsets": [None if master is None else start], "group": comm, "names": ["w"],
            "fsdp_shard_model_weights": None, "check_finite": False, "exchange": "full",
            "verify": "off", "amax_groups": (),
        }  # fmt: skip
        if not honest:
            name = draw.choice([each for each in arguments if each != "group"])
            arguments[name] = changed(arguments[name], draw)
        elif comm.size == 1:
            arguments["exchange"] = draw.choice(("full", "boundary"))
        plan = zerocast.CastPlan(**arguments)
        for _ in range(draw.choice((1, 1, 2)) if comm.size == 1 else 1):
            plan.cast()
            plan.all_gather()
        zerocast.post_all_gather_processing([weight])
        if honest and not (weight.recipe.state or weight.recipe.scheme == "delayed"):
            expected = zerocast.quantize(
                whole.view(weight.shape), weight.recipe, dtype=weight.dtype, name="w",
                columnwise=weight.quantized_storage.has_columnwise,
            )  # fmt: skip
            assert_same_storage(weight, expected, f"{weight.recipe}, {tuple(weight.shape)}")
        if comm.size == 1 and master is not None and draw.random() < 0.3:
            other = odd_tensor(master, draw)
            if isinstance(other, torch.Tensor):
                with contextlib.suppress(RuntimeError):  # of torch: a kind that .data cannot be
                    master.data = other.detach()
            plan.cast([other] if draw.random() < 0.5 else None)
            plan.all_gather()
        weight.dequantize()


TARGETS: dict[str, tuple[Callable[[Path], Target], int]] = {
    "weights": (Weights, 15),
    "files": (SavedFiles, 10),
    "checkpoints": (Checkpoints, 4),
    "states": (States, 4),
    "layer states": (LayerStates, 15),
    "deltas": (Deltas, 18),
    "faults": (FaultFiles, 5),
    "exports": (Exports, 3),
    "conversions": (Conversions, 3),
    "comparisons": (Comparisons, 3),
    "texts": (Texts, 12),
    "casts": (Casts, 8),
}
"""By name, and how many of 100 inputs each has: quick ones have more."""
