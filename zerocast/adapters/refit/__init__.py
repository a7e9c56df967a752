"""Adapters from :class:`zerocast.refit.Refit` to the interfaces by which frameworks send weights.

They support verl, slime, miles, NeMo-RL and vLLM at the commits in tests/adapters/interfaces.json.
tests/adapters/test_refit.py calls them by the interfaces recorded there, and scripts/serving.sh
runs tests/integration/test_vllm_refit.py with vLLM. An adapter can be removed when its project has
another interface, or accepts ``Refit.named_tensors()`` directly.

The adapters are independent, import the other project only when called, and patch nothing.

    verl        an engine's parameters, whole or in shards
    slime       slime's and miles' functions that quantize converted parameters
    nemo_rl     the map of NeMo-RL's resharding refit
    vllm        a weight source for vLLM's transfer engines, which SkyRL also uses
"""
