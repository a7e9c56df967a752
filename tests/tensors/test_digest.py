import torch

from zerocast.tensors.digest import RepeatedDigests, digest


def test_the_digest_is_of_the_bytes_and_not_of_where_they_lie():
    """A view that begins at an odd byte, one with strides, and a copy give one number; so does
    every dtype of the same bytes.
    """
    data = torch.arange(4001, dtype=torch.int64).remainder(253).to(torch.uint8)
    assert digest(data[1:]) == digest(data[1:].clone())
    matrix = data[:4000].view(40, 100)
    assert digest(matrix.t()) == digest(matrix.t().contiguous())
    assert digest(data[:4000].view(torch.bfloat16)) == digest(data[:4000])


def test_digests_are_prepared_once_and_of_what_lies_there_now(monkeypatch):
    """Each is that of the bytes; other bytes in the same memory are read by the same launch, other
    memory by a new one.
    """
    prepared = []
    prepare = RepeatedDigests._prepare

    def counted(repeated, *args):
        prepared.append(args)
        prepare(repeated, *args)

    monkeypatch.setattr(RepeatedDigests, "_prepare", counted)
    tensors = [torch.arange(9.0), torch.arange(7, dtype=torch.uint8), torch.empty(0)]
    repeated = RepeatedDigests()
    for moves in (1, 1, 2, 2):
        if moves > len(prepared):
            tensors[1] = tensors[1] + 1
        tensors[0].mul_(-3)
        found = repeated.of(tensors).tolist()
        assert len(prepared) == moves
        assert found == [int(digest(each)) for each in tensors]
        del prepared[moves:]
