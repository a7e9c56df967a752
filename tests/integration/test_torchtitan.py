"""torchtitan's own Trainer trains what zerocast's converter makes of its model, on CPU ranks."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.programs import output_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        find_spec("torchtitan") is None, reason="scripts/torchtitan.sh installs torchtitan"
    ),
]

PROGRAM = Path(__file__).with_name("train_by_torchtitan.py")

REFUSED = {
    ("delayed", "eager"): "torchtitan recomputes activations in the backward",
    ("rowwise_with_gw_hp", "eager"): "'rowwise' quantizes those as well",
    ("mxfp8_rceil_wgrad_with_hp", "eager"): "'mxfp8_rceil' quantizes those as well",
    ("mxfp8_cublas", "eager"): "'mxfp8_cublas_rceil' is that scheme",
    **{
        (recipe, f"{mode}/full_dtensor"): "Choose 'spmd_types' or 'partial_dtensor'"
        for recipe in ("tensorwise", "mxfp8_rceil", "nvfp4")
        for mode in ("tp", "fsdp+tp")
    },
}
"""By recipe and mode, a part of what is said."""

MODES = {
    "eager": 39,
    "eager/partial_dtensor": 3,
    "eager/full_dtensor": 3,
    "resumed": 3,
    "tp": 3,
    "tp/partial_dtensor": 3,
    "tp/full_dtensor": 3,
    "tp-quantized-by-forwards": 3,
    "fsdp+tp": 3,
    "fsdp+tp/partial_dtensor": 3,
    "fsdp+tp/full_dtensor": 3,
    "compiled": 9,
    "compiled-weights-only": 3,
}
"""How many configurations there are of each."""


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> dict[tuple[str, str, str], str]:
    """By recipe, activation checkpoints and mode, what the program says."""
    folder = tmp_path_factory.mktemp("cells")
    *lines, _ = output_of([sys.executable, PROGRAM, folder], timeout=2300).splitlines()
    return {tuple(cell.split()): said for cell, said in (line.split(": ", 1) for line in lines)}


@pytest.mark.parametrize("mode", MODES)
def test_a_configuration_trains_or_is_refused_by_name(cells, mode):
    """Three steps with losses near those of the unconverted model and the same whatever is
    computed again, six of which three are resumed; every weight was gathered as its part of the
    unsharded cast. Or zerocast refuses it before the first step.
    """
    own = {cell: said for cell, said in cells.items() if cell[2] == mode}
    assert len(own) == MODES[mode]
    count = 0 if mode == "tp-quantized-by-forwards" else 10
    trained = f"; {count} of 17 parameters are all-gathered in codes"
    for cell, said in own.items():
        why = REFUSED.get((cell[0], mode))
        kind, expected = ("trained", trained) if why is None else ("refused", why)
        assert said.startswith(kind), (cell, said)
        assert expected in said, (cell, said)
