"""The cast by hand, for an optimizer of your own: mpirun -n 4 python -m mpi4py <this file>."""

import torch
from mpi4py import MPI

import zerocast

comm = zerocast.as_communicator(MPI.COMM_WORLD)  # a torch.distributed ProcessGroup serves as well

# Three FP32 weights as an optimizer starts from them, the same on every rank.
generator = torch.Generator().manual_seed(0)
initial = [torch.randn(shape, generator=generator) for shape in ((320, 96), (50, 112), (7, 16))]

# 1. Model weights: NVFP4 codes and scales, whole on every rank.
recipe = zerocast.NVFP4BlockScaling()
weights = [zerocast.quantize(w, recipe, dtype=torch.bfloat16) for w in initial]

# 2. Let the codes be slices of one flat buffer, which an all-gather can fill in place. Two 4-bit
#    codes share a byte, so ranks own an even number of elements each; the end is padding.
total = sum(w.numel() for w in weights)
per_rank = -(-total // (2 * comm.size)) * 2
flat_codes = torch.zeros(comm.size * per_rank // 2, dtype=torch.uint8)
first, last = comm.rank * per_rank, (comm.rank + 1) * per_rank  # the elements that I own

# 3. Masters: the FP32 elements that I own of each weight, and where in the weight they start.
masters, start_offsets, begin = [], [], 0
for weight, values in zip(weights, initial, strict=True):
    end = begin + weight.numel()
    zerocast.replace_raw_data(weight, flat_codes[begin // 2 : end // 2])
    start, stop = max(first, begin) - begin, min(last, end) - begin
    masters.append(values.view(-1)[start:stop].clone() if start < stop else None)
    start_offsets.append(start if start < stop else None)
    begin = end

for _ in range(3):
    # 4. Your optimizer steps the masters in place, from reduce-scattered gradients.
    for master in masters:
        if master is not None:
            master.mul_(0.9).add_(0.01)
    # 5. Cast: one all-reduce of amaxes inside; writes scales, and my own codes in flat_codes.
    zerocast.cast_master_weights_to_nvfp4(weights, masters, start_offsets, comm)
    # 6. Everybody's codes, in place; then what is derived from them.
    comm.all_gather_(flat_codes)
    zerocast.post_all_gather_processing(weights)

# On every rank the weights are now, byte for byte, the cast of the whole masters.
for weight, values in zip(weights, initial, strict=True):
    for _ in range(3):
        values.mul_(0.9).add_(0.01)
    whole = zerocast.quantize(values, recipe, dtype=torch.bfloat16)
    for name, expected in whole.quantized_storage.buffers.items():
        assert torch.equal(weight.quantized_storage.buffers[name], expected), (
            f"rank {comm.rank}: {name}"
        )
print(f"rank {comm.rank} of {comm.size}: every byte equals the unsharded cast")
