"""What becomes of gloo's threads before Python finalizes, where they would abort the process."""

import sys

import pytest

from tests.support.programs import output_of

START = """
import pathlib, sys, threading, time, torch, torch.distributed as dist, zerocast

def threads():
    names = [each.read_text() for each in pathlib.Path("/proc/self/task").glob("*/comm")]
    return sum("gloo_runloop" in name for name in names)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

ZERO = """
model = torch.nn.Linear(32, 32)
zerocast.nn.convert(model, "mxfp8", weights="quantized")
optimizer = zerocast.optim.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
model(torch.ones(1, 32)).sum().backward()
optimizer.step()
before = threads()
dist.destroy_process_group()
print(before, threads())
"""

FSDP2 = """
from torch.distributed.fsdp import fully_shard

model = torch.nn.Linear(32, 32)
zerocast.nn.convert(model, "mxfp8", weights="master")
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 32)).sum().backward()
optimizer.step()
dist.destroy_process_group()
is_last = threading.Event()

def late():
    is_last.wait()
    time.sleep(0.05)
    print(threads(), "late", flush=True)

threading.Thread(target=late, daemon=True).start()
is_last.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_destroy_process_group_joins_the_threads_of_gloo_after_a_zero_step():
    """Nothing holds the group that ends, neither ours nor torch's modules: its threads are gone."""
    assert output_of([sys.executable, "-c", START + ZERO]).split() == ["2", "0"]


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_threads_of_a_group_that_lives_on_get_the_gil_before_python_finalizes():
    """An FSDP2 model holds its group. A thread that asks for the GIL 50 ms after the last line of
    the program, as one of gloo may, still gets it.
    """
    assert output_of([sys.executable, "-c", START + FSDP2]).split() == ["2", "late"]
