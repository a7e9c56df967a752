"""scripts/count_instructions.py: the counts that it reads out of what callgrind writes."""

from count_instructions import instructions

DUMP = """
ob=/usr/lib/libc.so.6
fn=memcpy
0 1000
ob=/zerocast/_native/libzerocast_cpu.so
fn=cast
0 44
cob=/usr/lib/libc.so.6
cfn=memcpy
calls=1 0
0 1000
0 6
"""


def test_only_the_library_is_counted():
    """Its own instructions, without those of functions that it calls."""
    assert instructions(DUMP) == 50
