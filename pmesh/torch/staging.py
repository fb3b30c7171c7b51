"""Tensors of any device and layout as pmesh takes them: on the CPU, in one piece of memory."""

from collections.abc import Sequence

from pmesh.torch.library import Tensor, torch


def given(x: Tensor) -> Tensor:
    """The values, outside of autograd; a view of the tensor where it lies so already."""
    check(x)
    return x.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def check(x: Tensor) -> None:
    """Raises ValueError for a tensor that is more, or less, than its values."""
    if x.layout != torch.strided:
        raise ValueError(f"the backend 'pmesh' takes dense tensors, not {x.layout}")
    if x.is_quantized or x.device.type == "meta":
        what = "quantized" if x.is_quantized else "of the device 'meta', without data"
        raise ValueError(f"the backend 'pmesh' can't move a tensor that is {what}")


class Target:
    """A tensor to be written to, and where pmesh writes: itself, or memory on the CPU."""

    def __init__(self, x: Tensor, *, filled: bool = False) -> None:
        """`filled`: whether the memory is to have the tensor's values."""
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
        """Bring what lies in the memory to the tensor."""
        if self.memory.data_ptr() != self._tensor.data_ptr() or self._tensor.device.type != "cpu":
            self._tensor.copy_(self.memory)


def targets(xs: Sequence[Tensor]) -> list[Target]:
    """One for each."""
    return [Target(x) for x in xs]


def pieces(x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Views of so many values each, one behind the other, of a tensor in one piece."""
    flat = x.reshape(-1)
    found: list[Tensor] = []
    begin = 0
    for count in counts:
        found.append(flat[begin : begin + count])
        begin += count
    return found
