"""vLLM, as it is, fed by a refit."""

import sys
from pathlib import Path

import pytest

from tests.support.programs import output_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1000)]


def test_vllm_serves_what_it_is_sent(tmp_path: Path) -> None:
    """A Llama whole, by a ``WeightSource`` that its engines take; and by the modules that changed,
    after which it holds the bytes that it holds after everything.
    """
    pytest.importorskip("vllm")

    program = Path(__file__).with_name("refit_by_vllm.py")
    said = output_of([sys.executable, program, tmp_path / "served"], timeout=900)
    assert "the server holds the same bytes after a part as after everything" in said
