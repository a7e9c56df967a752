"""Visits a part of every claim of scripts/prove.py, another one whenever the arithmetic changes."""

from pathlib import Path

import numpy as np
import prove
import pytest

from tests.cuda_emulation.emulator import needs_emulation
from tests.oracles.finite_domains import E2M1, E4M3, E5M2, MX, NVFP4, Float8
from tests.support.instruction_sets import ISAS
from zerocast import MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from zerocast.recipes import QParams

BACKENDS = [*ISAS, "reference", pytest.param("emulated", marks=needs_emulation)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_part_of_every_claim_holds(backend: str) -> None:
    """The first item, the last, and one that changes with the arithmetic."""
    drawn = np.random.default_rng(int(prove.hash_of_arithmetic(), 16))
    for name, claim in prove.CLAIMS.items():
        first = int(drawn.integers(claim.items))
        for item in {0, first, claim.items - 1}:
            prove.visit(name, backend, range(item, item + 1), "")


@pytest.mark.parametrize(
    ("claim", "item"),
    [
        (Float8(E4M3, "e5m2", QParams()), 16000),
        (MX(E5M2, MXFP8BlockScaling()), 130),
        (MX(E2M1, MXFP4BlockScaling(scale_rounding="even"), "floor"), 130),
        (NVFP4(NVFP4BlockScaling(), scales_only=True), 16000),
    ],
    ids=["format", "block format", "scale rounding", "blocks"],
)
def test_another_numerics_is_told_apart(claim: prove.Claim, item: int) -> None:
    """A claim about other numerics than those that cast is refuted."""
    with pytest.raises(AssertionError, match="expected"):
        claim.visit(item)


def test_a_proof_that_was_stopped_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was visited is not visited again, and counts as long as the arithmetic is the same."""
    asked = f"--claims mxfp8 --backends {ISAS[0]} --processes 1 --kept {tmp_path}".split()
    visited: list[int] = []

    def visit(claim: MX, item: int) -> int:
        visited.append(item)
        assert len(visited) != 200, "stopped"
        return 2

    monkeypatch.setattr(MX, "visit", visit)
    with pytest.raises(AssertionError, match="stopped"):
        prove.main(asked)
    prove.main(asked)
    assert visited == [*range(200), *range(prove.CHUNK, 255)]
    assert "255    510" in capsys.readouterr().out
    monkeypatch.setattr(prove, "hash_of_arithmetic", lambda: "another")
    prove.main(asked)
    assert visited[-255:] == [*range(255)]
