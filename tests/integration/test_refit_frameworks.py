"""verl, SkyRL and NeMo-RL, as they are, take what the adapters give.

``scripts/newest.sh`` installs verl and SkyRL. The package index has no NeMo-RL; its test runs where
a checkout is on Python's path.
"""

import importlib
import inspect
from pathlib import Path

import pytest

from tests.support.programs import on_torchrun_ranks, output_of
from zerocast.adapters.refit import nemo_rl, verl

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("refit_by_frameworks.py")
METHODS = {
    "verl": (verl.EngineWeights, "verl.workers.engine.base", "BaseEngine",
             ["get_per_tensor_param", "get_per_tensor_param_shard"]),
    "nemo_rl": (nemo_rl.LocalShards, "nemo_rl.weight_sync.nccl_reshard_utils",
                "RefitBuilderInterface", ["build_hf_to_local_param_map"]),
}  # fmt: skip
"""By project: the adapter, and the module, class and methods that it implements."""


@pytest.mark.parametrize("project", METHODS)
def test_shards_of_fsdp2_fit(project):
    """On three ranks each tensor in the project's own class is this rank's part of the whole, and
    the adapter's methods take every argument that the project's take.
    """
    adapter, module, base, methods = METHODS[project]
    pytest.importorskip(module)
    for name in methods:
        theirs = inspect.signature(getattr(getattr(importlib.import_module(module), base), name))
        ours = inspect.signature(getattr(adapter, name)).parameters
        keywords = any(p.kind is p.VAR_KEYWORD for p in ours.values())
        assert keywords or set(theirs.parameters) <= set(ours), name
    said = output_of(on_torchrun_ranks(3, PROGRAM, project))
    assert said.count("8 tensors are right") == 3


def test_skyrl_takes_a_weight_source_of_vllm():
    """SkyRL's trainer gives engines a ``WeightSource``; test_vllm_refit.py gives vLLM one."""
    skyrl = pytest.importorskip("skyrl")
    files = Path(skyrl.__file__).parent.rglob("*.py")
    assert any("WeightSource" in file.read_text() for file in files)
