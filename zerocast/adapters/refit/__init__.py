"""Adapters from :class:`zerocast.refit.Refit` to the interfaces by which trainers and servers move
weights; each depends on none of the others, imports the other project only when it is called, and
patches nothing.

    verl        an engine's parameters, whole or in shards
    slime       slime's and miles' functions that quantize converted parameters
    nemo_rl     the map of NeMo-RL's resharding refit
    vllm        a weight source of vLLM's transfer engines, which SkyRL takes, too
"""
