"""The lab: tools that measure zerocast and other packages, and do not train.

It uses the core by the names that tests/fence.toml lists, and nothing in the core uses it.

    costs          bytes, launches and seconds of a step, computed without memory
    conformance    compares the bytes of other packages with the required ones, and finds causes
    threaded_cast  casts one weight from shards, with threads as ranks
"""
