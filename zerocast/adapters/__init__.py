"""Adapters: implement names and interfaces of other projects with zerocast.

They use the core by the names that tests/fence.toml lists, and nothing in the core uses them. The
first lines of each say which releases it supports, how it is tested, and when it can be removed.

    transformer_engine  TransformerEngine's names, so that code written for them runs on zerocast
    megatron            Megatron-Core's GPTModel and distributed optimizer
    deepspeed           DeepSpeed's ZeRO stages 1 and 2
    torchtitan          a model converter and its options
    refit               the ways in which reinforcement learning frameworks send weights to servers
    replacements        functions of another package, replaced while zerocast is installed there
"""
