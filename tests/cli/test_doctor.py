"""``python -m zerocast doctor``; where nothing is installed beside torch, tests/test_wheel.py."""

import json
import subprocess

import pytest
import torch

from zerocast.backends import native_library
from zerocast.cli import doctor, main, self_check
from zerocast.cli.doctor import Finding, backends, casts, ranks
from zerocast.errors import BackendError
from zerocast.recipes import RECIPES
from zerocast.tensors import quantize


def told(findings) -> dict[str, Finding]:
    """By name."""
    return {finding.name: finding for finding in findings}


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


@pytest.mark.parametrize("compiler", [True, False])
def test_without_the_native_library(monkeypatch, compiler):
    """The reason why the reference casts is given, and whether a compiler could help."""

    def missing():
        raise BackendError("there is no library.")

    monkeypatch.setattr(native_library, "find_library", missing)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name if compiler else None)
    found = told(backends())
    assert found["cpu"].status == "slow"
    assert "there is no library" in found["cpu"].text
    assert found["compiler"].status == ("ok" if compiler else "missing")


@pytest.mark.parametrize(
    ("said", "status"), [("HYDRA build details", "ok"), ("Open MPI 5", "wrong")]
)
def test_the_launcher_of_another_mpi(monkeypatch, said, status):
    """mpiexec of another MPI than mpi4py's would start jobs of one rank."""
    monkeypatch.setattr(doctor, "mpi_library", lambda: Finding("MPI", "ok", "loads MPICH 5"))
    monkeypatch.setattr(doctor.shutil, "which", lambda *args, **options: "mpiexec")
    answer = subprocess.CompletedProcess([], 0, said, "")
    monkeypatch.setattr(doctor, "run", lambda command: answer)
    assert told(ranks())["mpiexec"].status == status
