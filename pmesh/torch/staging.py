"""Brings tensors of any device and strides to the CPU and into contiguous memory, for pmesh."""

from collections.abc import Sequence

from pmesh.torch.library import Tensor, torch


def given(x: Tensor) -> Tensor:
    """Return the values without autograd; a view if the tensor is contiguous on the CPU."""
    check(x)
    return x.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def check(x: Tensor) -> None:
    """Raise ValueError for a tensor that is not dense, is quantized or has no data."""
    if x.layout != torch.strided:
        raise ValueError(f"the backend 'pmesh' takes dense tensors, not {x.layout}")
    if x.is_quantized or x.device.type == "meta":
        what = "quantized" if x.is_quantized else "of the device 'meta', without data"
        raise ValueError(f"the backend 'pmesh' can't move a tensor that is {what}")


class Target:
    """A tensor to be written, and the memory that pmesh writes: the tensor's, or a CPU copy."""

    def __init__(self, x: Tensor, *, filled: bool = False) -> None:
        """If `filled`, the memory starts with the tensor's values."""
        check(x)
        self._tensor = x.detach()
        plain = not (x.is_conj() or x.is_neg()) and x.is_contiguous()
        if x.device.type == "cpu" and plain:
            self.memory = self._tensor
        elif filled:
            self.memory = given(x)
        else:
            self.memory = torch.empty(x.shape, dtype=x.dtype)

    def write(self) -> None:
        """Copy the memory to the tensor, unless it is the tensor's own."""
        if self.memory.data_ptr() != self._tensor.data_ptr() or self._tensor.device.type != "cpu":
            self._tensor.copy_(self.memory)


def targets(xs: Sequence[Tensor]) -> list[Target]:
    """Return a target for each tensor."""
    return [Target(x) for x in xs]


def pieces(x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return consecutive views of a contiguous tensor, with these numbers of values."""
    flat = x.reshape(-1)
    found: list[Tensor] = []
    begin = 0
    for count in counts:
        found.append(flat[begin : begin + count])
        begin += count
    return found
