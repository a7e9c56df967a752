"""Directories of save_pretrained: filled by one export, with all of its files or none; a report."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch

import zerocast
from tests.support.exports import contents
from tests.support.llama import TIED_160, llama
from tests.support.models import Bank
from tests.support.ranks import run_ranks
from zerocast.arguments import shown_bytes
from zerocast.export import load_pretrained, save_pretrained

DIALECT = "compressed-tensors/nvfp4"
BUCKETS = "zerocast.export.exported_weights.Export.buckets"


def bank(rows=(48, 32)) -> Bank:
    """Quantized weights."""
    model = Bank(rows).bfloat16()
    zerocast.nn.convert(model, "nvfp4")
    return model


@pytest.fixture
def umask():
    """Another than the usual one, so that a mode tells by whom it was set."""
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def test_every_file_has_the_mode_of_the_umask(tmp_path, umask):
    """Weights in one file and in several, whichever rank wrote them, the index, the configurations,
    and a tokenizer's files, whatever modes these had.
    """
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").touch(0o400)
    model = llama(TIED_160).bfloat16()
    zerocast.nn.convert(model, "nvfp4", filter_fqns=["down_proj"])
    for folder, size in ((tmp_path / "one", 2**30), (tmp_path / "some", 20_000)):
        options = {"dialect": DIALECT, "bucket_bytes": size, "tokenizer": tokenizer}
        run_ranks(
            "in_process",
            2,
            lambda comm, to=folder, given=options: save_pretrained(model, to, group=comm, **given),
        )
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
        assert modes.keys() >= {"config.json", "generation_config.json", "tokenizer.json"}
        assert set(modes.values()) == {0o666 & ~umask}


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "model-00001-of-00007.safetensors",
        "adapter_config.json",
        "tokenizer.json",
        ".0.zerocast-drafts",
    ],
)
@pytest.mark.parametrize("is_link", [False, True])
def test_a_directory_with_a_file_of_a_model_is_refused_before_a_cast(
    tmp_path, monkeypatch, name, is_link
):
    """Whatever would be read in the place of ours, or is of a name of ours, as file or dangling
    link; it stays, and nothing is written beside it.
    """
    folder, tokenizer = tmp_path / "folder", tmp_path / "tokenizer"
    for each in (folder, tokenizer):
        each.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    if is_link:
        (folder / name).symlink_to(tmp_path / "nowhere")
    else:
        (folder / name).write_text("kept")
    (folder / "README.md").write_text("kept")
    before = contents(folder)
    monkeypatch.setattr(BUCKETS, lambda self: pytest.fail("cast"))
    with pytest.raises(zerocast.InputError, match=f"a directory without files of .*has {name}"):
        save_pretrained(bank(), folder, dialect=DIALECT, tokenizer=tokenizer)
    assert contents(folder) == before
    assert not (tmp_path / "nowhere").exists()


def refused_before_a_cast(monkeypatch, folder: Path, model, message: str, **options) -> None:
    """Assert that both ranks raise ``message``, no weight was cast, and nothing was written."""

    def run(comm):
        with pytest.raises(zerocast.ZerocastError, match=message):
            save_pretrained(model, folder, dialect=DIALECT, group=comm, **options)

    with monkeypatch.context() as patch:
        patch.setattr(BUCKETS, lambda self: pytest.fail("cast"))
        run_ranks("in_process", 2, run)
    assert not contents(folder)


def test_what_can_be_known_before_a_cast_is_refused_before_it(tmp_path, monkeypatch):
    """A generation configuration that transformers refuses, a configuration that is no JSON, what
    is no tokenizer, a path that is no directory. The same directory then takes the repaired model.
    """
    folder, model = tmp_path / "folder", llama(TIED_160).bfloat16()
    folder.mkdir()
    zerocast.nn.convert(model, "nvfp4", filter_fqns=["down_proj"])
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.6
    refused_before_a_cast(monkeypatch, folder, model, "temperature")
    model.generation_config.temperature = None
    model.config.odd = object()
    refused_before_a_cast(monkeypatch, folder, model, "not JSON serializable")
    del model.config.odd
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").write_text("")
    plain = llama(TIED_160)
    for tokenizer in ("nowhere", tmp_path / "other", plain, 3):
        refused_before_a_cast(
            monkeypatch, folder, model, "tokenizer must have a method", tokenizer=tokenizer
        )
    save_pretrained(model, folder, dialect=DIALECT)
    assert load_pretrained(folder)
    with pytest.raises(zerocast.ZerocastError, match="File exists"):
        save_pretrained(model, folder / "config.json", dialect=DIALECT)


@pytest.mark.parametrize("wrong", ["weight", "file", "interrupt"])
def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch, wrong):
    """Amid casts, where one rank cannot write its file, or the last name cannot be given; the next
    try succeeds.
    """
    from zerocast import safe_files
    from zerocast.export import pretrained

    model, write, replace = bank([32] * 4), pretrained.write_tensors, Path.replace
    (tmp_path / "README.md").write_text("kept")

    def full(tensors, path):
        write(tensors, path)
        if path.name == "model-00002-of-00004.safetensors":
            raise OSError("no space")

    def ends(self, path):
        if path.name == "config.json":
            raise KeyboardInterrupt
        return replace(self, path)

    def run(comm):
        save_pretrained(model, tmp_path, dialect=DIALECT, group=comm, bucket_bytes=1000)

    with monkeypatch.context() as patch:
        if wrong == "weight":
            broken = Bank([32] * 4).bfloat16()
            with torch.no_grad():
                broken.layers[3].weight[3, 5] = torch.nan
            zerocast.nn.convert(broken, "nvfp4")
            model, kept = broken, model
        elif wrong == "file":
            patch.setattr(pretrained, "write_tensors", full)
        else:
            patch.setattr(safe_files.Path, "replace", ends)
        ranks = 1 if wrong == "interrupt" else 2
        error = {"weight": zerocast.NonFiniteError, "interrupt": KeyboardInterrupt}
        with pytest.raises(error.get(wrong, zerocast.ZerocastError)):
            run_ranks("in_process", ranks, run)
    assert contents(tmp_path) == {"README.md": b"kept"}
    if wrong == "weight":
        model = kept
    run_ranks("in_process", 2, run)
    assert len(load_pretrained(tmp_path)) == 4


class Meanwhile:
    """A tokenizer that does something while an export has begun."""

    def __init__(self, act) -> None:
        self.act = act

    def save_pretrained(self, folder) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")
        self.act()


def test_two_exports_at_once_do_not_mix(tmp_path):
    """The later is refused while the first is under way, and the first is whole."""
    first, second = bank([48, 16]), bank([32, 64, 32])

    def other():
        with pytest.raises(zerocast.InputError, match="export that is under way"):
            save_pretrained(second, tmp_path, dialect=DIALECT)

    save_pretrained(first, tmp_path, dialect=DIALECT, tokenizer=Meanwhile(other))
    assert {tuple(each.shape) for each in load_pretrained(tmp_path).values()} == {
        (48, 96),
        (16, 96),
    }
    assert {*contents(tmp_path)} == {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model-1-of-2.safetensors"])
@pytest.mark.parametrize("is_seen", [True, False])
def test_what_another_program_writes_meanwhile_stays(tmp_path, monkeypatch, name, is_seen):
    """Also between the last look at the directory and the file that is put in place: nothing of
    another's is overwritten, ours go, and every rank says so.
    """
    from zerocast.export import pretrained

    check, looks, model = pretrained.check_folder, [], bank()

    def appears(drafts):
        looks.append(drafts)
        if len(looks) == 2 and is_seen:
            (tmp_path / name).write_text("another's")
        check(drafts)
        if len(looks) == 2:
            (tmp_path / name).write_text("another's")

    if not is_seen and name == "model-1-of-2.safetensors":
        pytest.skip("not a name of ours")
    monkeypatch.setattr(pretrained, "check_folder", appears)

    def run(comm):
        with pytest.raises(zerocast.ZerocastError, match=name):
            save_pretrained(model, tmp_path, dialect=DIALECT, group=comm)

    run_ranks("in_process", 2, run)
    assert contents(tmp_path) == {name: b"another's"}


def test_ranks_that_do_not_share_the_directory_are_refused(tmp_path, monkeypatch):
    """Before the first cast, on all ranks."""
    is_dir, model = Path.is_dir, bank()
    seen = lambda path: not path.name.endswith("drafts") and is_dir(path)  # noqa: E731
    monkeypatch.setattr(Path, "is_dir", seen)
    refused_before_a_cast(monkeypatch, tmp_path, model, "a directory that all ranks share")


def test_all_files_of_a_tokenizer_are_copied_and_none_of_its_model(tmp_path):
    """Of Marian, tiktoken, remote code, BERTweet, GPT-NeoX-Japanese, Mistral, of processors and
    chat templates, also links, as a hub's cache has them; no weights, no configuration.
    """
    tokenizer, folder = tmp_path / "tokenizer", tmp_path / "folder"
    (tokenizer / "additional_chat_templates").mkdir(parents=True)
    (tokenizer / "checkpoint-7").mkdir()
    copied = [
        "tokenizer_config.json", "source.spm", "target.spm", "vocab.json", "qwen.tiktoken",
        "tokenization_x.py", "bpe.codes", "dict.txt", "emoji.json", "tekken.json", "spm_char.model",
        "sentencepiece.bpe.model", "merges.txt", "added_tokens.json", "special_tokens_map.json",
        "preprocessor_config.json", "processor_config.json", "chat_template.jinja",
        "additional_chat_templates/rag.jinja", "prophetnet.tokenizer", "linked.model",
    ]  # fmt: skip
    left = [
        "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "optimizer.pt",
        "config.json", "generation_config.json", ".gitattributes", "m.gguf", "adapter_config.json",
        "checkpoint-7/tokenizer.json",
    ]  # fmt: skip
    for name in [*copied[:-1], *left]:
        (tokenizer / name).write_text(name)
    (tmp_path / "blob").write_text("linked.model")
    (tokenizer / "linked.model").symlink_to(tmp_path / "blob")
    save_pretrained(bank(), folder, dialect=DIALECT, tokenizer=str(tokenizer))
    found = contents(folder)
    for name in copied:
        assert found.pop(name) == name.encode(), name
    assert {*found} == {"config.json", "model.safetensors", "additional_chat_templates"}
    assert json.loads(found["config.json"])["quantization_config"]
    assert not (folder / "linked.model").is_symlink()


def test_the_report_says_what_was_written(tmp_path, caplog):
    """On every rank: each file with its size, and the format of each tensor; in a few lines for
    many layers, which rank 0 logs.
    """
    model = llama(TIED_160).bfloat16()
    zerocast.nn.convert(model, "nvfp4", filter_fqns=["down_proj"])

    def run(comm):
        options = {"dialect": DIALECT, "bucket_bytes": 20_000, "group": comm}
        return save_pretrained(model, tmp_path, **options)

    with caplog.at_level(logging.INFO, logger="zerocast"):
        report, other = run_ranks("in_process", 2, run)
    assert report == other
    assert report.directory == tmp_path
    assert report.files == {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    loaded = load_pretrained(tmp_path)
    assert report.formats == {
        name: DIALECT if isinstance(tensor, zerocast.QuantizedTensor) else str(tensor.dtype)
        for name, tensor in loaded.items()
    }
    text = str(report)
    assert [record.message for record in caplog.records] == [text]
    assert f"{len(report.files)} files, {shown_bytes(sum(report.files.values()))}" in text
    assert "model.layers.*.self_attn.q_proj.weight (2)" in text
    assert "model.embed_tokens.weight" in text
    assert "down_proj" in text.partition("torch.bfloat16")[2]
