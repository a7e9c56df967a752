"""Adapters from :class:`zerocast.refit.Refit` to the interfaces by which frameworks send weights.

They support verl 0.9, slime, miles, NeMo-RL and vLLM 0.30 to 0.32. tests/integration has programs
that run them with verl, NeMo-RL and vLLM; scripts/newest.sh and scripts/serving.sh install these.
An adapter can be removed when its project has another interface, or accepts
``Refit.named_tensors()`` directly.

The adapters are independent, import the other project only when called, and patch nothing.

    verl        an engine's parameters, whole or in shards
    slime       slime's and miles' functions that quantize converted parameters
    nemo_rl     the map of NeMo-RL's resharding refit
    vllm        a weight source for vLLM's transfer engines, which SkyRL also uses
"""
