"""``python -m zerocast doctor``; where nothing is installed beside torch, tests/test_wheel.py."""

import json
import subprocess
import sys

import pytest
import torch

from zerocast.backends import native_library
from zerocast.cli import doctor, main, self_check
from zerocast.cli.doctor import backends, casts, ranks
from zerocast.errors import BackendError
from zerocast.recipes import RECIPES
from zerocast.tensors import quantize


def test_every_recipe_is_checked(capsys):
    """The self-check compares bytes of every recipe; text and JSON say the same."""
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    checked = {f["name"]: f for f in findings if f["section"].startswith("Cast on")}
    assert set(RECIPES) < set(checked)
    assert {f["status"] for f in checked.values()} == {"ok"}
    main(["doctor"])
    text = capsys.readouterr().out
    assert all(f["name"] in text for f in findings)


def test_a_wrong_byte_is_found(monkeypatch):
    """One code that is not that of the unsharded cast makes the finding wrong, and names where."""

    def spoiled(*args, **options):
        weight = quantize(*args, **options)
        weight.rowwise_data.view(-1)[17] ^= 1
        return weight

    monkeypatch.setattr(self_check, "quantize", spoiled)
    for finding in casts(torch.device("cpu")):
        assert finding.status == "wrong"
        assert "1 bytes of rowwise_data differ" in finding.text


def test_an_error_of_the_check_is_a_finding(monkeypatch):
    """A recipe that fails is wrong, and the others are checked all the same."""

    def failing(*args, **options):
        raise OSError("no such thing")

    monkeypatch.setattr(self_check, "quantize", failing)
    findings = list(casts(torch.device("cpu")))
    assert len(findings) == len(self_check.recipes())
    assert all("OSError: no such thing" in f.text for f in findings)


@pytest.mark.parametrize(
    ("sets", "status"), [(["avx2", "baseline"], "ok"), (["neon"], "ok"), (["baseline"], "slow")]
)
def test_the_instruction_set_is_named(monkeypatch, sets, status):
    """The first of those that the library lists; plain loops are slow."""
    monkeypatch.setattr(native_library, "instruction_sets", lambda library: sets)
    found = {each.name: each for each in backends()}["cpu"]
    assert found.status == status
    assert f"native, {sets[0]} of {', '.join(sets)}" in found.text


def test_without_the_native_library(monkeypatch):
    """The reason why the reference casts is given."""

    def missing():
        raise BackendError("there is no library.")

    monkeypatch.setattr(native_library, "find_library", missing)
    (found,) = backends()
    assert found.status == "slow"
    assert "there is no library" in found.text


@pytest.mark.parametrize(
    ("printed", "code", "status", "said"),
    [
        ("2 MPICH 5.0.2\n", 0, "ok", "starts ranks of MPICH 5.0.2"),
        ("1 Open MPI 5.0.8\n1 Open MPI 5.0.8\n", 0, "wrong", "loads: Open MPI 5.0.8"),
        ("", 1, "wrong", "no libmpi"),
    ],
)
def test_the_launcher_starts_two_ranks(monkeypatch, printed, code, status, said):
    """One that starts jobs of one rank, as that of another MPI does, is wrong; one that fails is
    wrong with its reason.
    """
    pytest.importorskip("mpi4py")
    monkeypatch.setattr(doctor.shutil, "which", lambda *args, **options: "mpiexec")

    def run(command, **options):
        assert command[:4] == ["mpiexec", "-n", "2", sys.executable]
        return subprocess.CompletedProcess(command, code, printed, "no\n libmpi")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    *_, found = ranks()
    assert found.status == status
    assert said in found.text
