"""Adapters from :class:`zerocast.refit.Refit` to the interfaces by which frameworks move weights.

They serve verl, slime, miles, NeMo-RL and vLLM at the commits of tests/adapters/interfaces.json, by
whose recorded interfaces tests/adapters/test_refit.py calls them. scripts/serving.sh runs
tests/integration/test_vllm_refit.py beside vLLM itself. One may go when its project has another
interface, or takes ``Refit.named_tensors()`` as it is.

Each depends on none of the others, imports the other project only when it is called, and patches
nothing.

    verl        an engine's parameters, whole or in shards
    slime       slime's and miles' functions that quantize converted parameters
    nemo_rl     the map of NeMo-RL's resharding refit
    vllm        a weight source of vLLM's transfer engines, which SkyRL takes, too
"""
