"""Adapters: the names and the interfaces of other projects, on zerocast.

They use the core by the names that tests/fence.toml lists, and nothing of the core uses them. Each
says in its first lines which releases it serves, how it is tested against them, and when it may go.

    transformer_engine  TransformerEngine's names, so that code written for them runs on zerocast
    megatron            Megatron-Core's GPTModel and distributed optimizer
    deepspeed           DeepSpeed's ZeRO stages 1 and 2
    torchtitan          a model converter and its options
    refit               how frameworks for reinforcement learning send weights to servers
    replacements        functions of another package, replaced while zerocast is installed there
"""
