"""Conformance packs and their runner: the same bytes everywhere, and causes that are found out."""

import hashlib
import json
import subprocess
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests.support.nightly import nightly
from zerocast.cli import conformance, main
from zerocast.export import DIALECTS
from zerocast.lab.conformance import PACKAGES, VERSION, Pack, Package, package_of, packs, score
from zerocast.lab.conformance.causes import FormulaChanges, changes_of, restated
from zerocast.numerics import ELEMENT_FORMATS

SHA256_OF_SUMS = {
    1: "3c0b339b18e82520309f761f3592b4f0d4caf4e733649439e56904c971b47d71"
}  # by the version of the packs
SUMS = Path(__file__).with_name("SHA256SUMS")
PAGE = Path(__file__).parents[3] / "docs" / "conformance.md"
NOT_HERE = ("torchao", "nvidia-modelopt", "vllm", "llmcompressor", "optimum-quanto", "auto-round",
            "fouroversix", "gguf")  # fmt: skip
OTHERS = [
    pytest.param(name, marks=[pytest.mark.integration] * (name in NOT_HERE))
    for name in PACKAGES if name != "zerocast"
]  # fmt: skip
INSTALLED = {each.name.removesuffix("-cpu") for each in metadata.distributions()}
PLANTED = ["e4m3", "e5m2", "e2m1", "e8m0", "compressed-tensors/fp8-channel", "gpt-oss/mxfp4",
           "compressed-tensors/nvfp4"]  # fmt: skip


@cache
def made() -> dict[str, Pack]:
    """Every pack, by its file."""
    return {pack.file: pack for pack in packs()}


def planted(subject, *changes):
    """A package that has the formula of a format or a dialect with changes."""
    made_of = partial(restated, subject, does=FormulaChanges(*changes))
    calls = {"encodes": {subject: lambda x: made_of(x)[0]}, "writes": {subject: made_of}}
    return Package(name="planted", **calls)


@pytest.mark.parametrize("subject", [*ELEMENT_FORMATS, "e8m0", *DIALECTS])
def test_the_formulas_stated_again_give_the_packs(subject):
    """Every byte that is encoded, by another text than the one that made it."""
    found = score(planted(subject), made().values())
    assert [each for each in found if each.different or each.refused] == []
    assert len(found) == 1 + (subject in DIALECTS)


@pytest.mark.parametrize(
    "partitions", [("modelopt/nvfp4", "sglang/mxfp8"), nightly(tuple(DIALECTS))]
)
def test_zerocast_gives_every_byte(partitions):
    """By this machine's backend, whole, and of some dialects on the ranks of the partitions."""
    whole = ("blocks", "tensors")
    asked = [p for p in made().values() if p.level in whole or p.subject in partitions]
    found = score(package_of("zerocast"), asked)
    assert [each for each in found if each.different or each.refused] == []
    assert len(found) == 2 * len(DIALECTS) + len(partitions)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore")
def test_every_difference_of_a_package_has_its_causes(name):
    """And the page has the counts of this version, and the causes."""
    if name not in INSTALLED:
        pytest.skip(f"needs {name}")
    package = package_of(name)
    found = score(package, made().values())
    assert found
    assert [each for each in found if each.causes is None] == []
    title = package.title.partition("+")[0]
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    for each in found:
        row = f"| {each.level}: {each.subject} | {each.compared:,} | {each.different:,} |"
        assert row in section, f"{PAGE.name}, {title}: {row}"
        assert [cause for cause in each.causes if cause not in section] == []


@pytest.mark.parametrize(("subject", "change"), [(s, c) for s in PLANTED for c in changes_of(s)])
def test_a_planted_change_is_the_cause(subject, change):
    """Of all bytes that it changes, by itself."""
    level = "blocks" if subject in DIALECTS else "values"
    (found,) = score(
        planted(subject, change), [made()[f"{level}-{subject.replace('/', '-')}.json"]]
    )
    assert found.causes == ({change: found.different} if found.different else {})


def test_what_is_none_of_the_changes_is_unexplained():
    """One bit of one scale; codes decoded to another value; and what is too large."""

    def write(x: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scales = restated("sglang/mxfp8", x, FormulaChanges())
        scales[0, 0] ^= 1
        return {"weight": codes, "weight_scale_inv": scales}

    of_codes = made()["values-e2m1.json"]
    for pack, calls, different, first in (
        (made()["blocks-sglang-mxfp8.json"], {"writes": {"sglang/mxfp8": write}}, 5,
         "near: weight_scale_inv[0, 0] is 0x76, required 0x77"),
        (of_codes, {"decodes": {"e2m1": lambda codes: codes.float()}}, 24,
         "decoded: values[1] is 0x3f800000 (1), required 0x3f000000 (0.5)"),
        # And it writes to what it is given.
        (of_codes, {"encodes": {"e2m1": lambda x: x.zero_()}}, 65_636,
         "every BF16 value: codes is torch.float32 [65536], required torch.uint8 [65536]"),
    ):  # fmt: skip
        (found,) = score(Package(name="planted", **calls), [pack])
        assert (found.different, found.causes, found.first) == (different, None, first)


def test_the_command(tmp_path, capsys, monkeypatch):
    """JSON and exit codes; packs that are written, with the hashes that are committed, which each
    file has; what cannot be measured, and what to do.
    """
    monkeypatch.setattr(conformance, "packs", lambda: list(made().values()))
    assert main(["conform", "torch", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [each["subject"] for each in found["scores"]] == ["e4m3", "e5m2", "e8m0"]
    assert main(["conform", "--packs", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("*.json"))) == len(made())
    assert (tmp_path / SUMS.name).read_text() == SUMS.read_text()
    assert hashlib.sha256(SUMS.read_bytes()).hexdigest() == SHA256_OF_SUMS[VERSION]
    subprocess.run(["sha256sum", "-c", "--quiet", SUMS.name], cwd=tmp_path, check=True)
    for arguments, message in (
        ([], "give PACKAGE"),
        (["nothing"], "must be one of zerocast, torch, "),
        (["no.module:PACKAGE"], "No module named 'no'; install it, and"),
        (["torch:nn"], "must be a zerocast.lab.conformance.Package, got <module"),
    ):
        assert main(["conform", *arguments]) == 2
        assert message in capsys.readouterr().err
