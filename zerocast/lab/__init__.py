"""The lab: what measures zerocast and others, and trains nothing.

It uses the core by the names that tests/fence.toml lists, and nothing of the core uses it.

    costs          bytes, launches and seconds of a step, worked out without memory
    conformance    which bytes other packages must give, and why they do not
    threaded_cast  one weight, cast from shards by ranks that are threads
"""
