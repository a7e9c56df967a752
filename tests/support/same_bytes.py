"""Byte-exact comparison that names the element and both values."""

import torch


def assert_same_bytes(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Both tensors, on whatever devices, have the same shape, dtype and bytes; else say where they
    first differ, and by what.
    """
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    assert actual.dtype == expected.dtype, (
        f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    )
    flat_actual = actual.detach().cpu().contiguous().view(-1)
    flat_expected = expected.detach().cpu().contiguous().view(-1)
    wrong = (flat_actual.view(torch.uint8) != flat_expected.view(torch.uint8)).nonzero()
    if len(wrong):
        element = int(wrong[0]) // flat_actual.element_size()
        a, e = flat_actual[element], flat_expected[element]
        raise AssertionError(
            f"{what}: element {element} of shape {tuple(actual.shape)} is {_show(a)}, expected "
            f"{_show(e)}; {len(wrong)} bytes differ in all"
        )


def assert_same_codes(x: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """[n] FP32 inputs have the same codes; a difference names the input, its bits and both."""
    wrong = (actual != expected).nonzero().flatten()
    if len(wrong):
        i = wrong[0]
        raise AssertionError(f"{_show(x[i])}: got 0x{actual[i]:02x}, expected 0x{expected[i]:02x}")


def _show(x: torch.Tensor) -> str:
    if x.dtype == torch.uint8:
        return f"0x{int(x):02X}"
    return (
        f"{x.item()!r} (0x{int(x.view(torch.int32)) & 0xFFFFFFFF:08X})"
        if x.element_size() == 4
        else repr(x.item())
    )


def assert_same_storage(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Two quantized weights hold the same bytes in every buffer: codes, scales, amax, padding,
    derived copies.
    """
    assert set(actual.quantized_storage.buffers) == set(expected.quantized_storage.buffers)
    for name, buffer in expected.quantized_storage.buffers.items():
        assert_same_bytes(actual.quantized_storage.buffers[name], buffer, f"{what}.{name}")
