"""What a launched script may train with; the command line lists it without the messages."""

from typing import Literal, TypeAlias

Engine: TypeAlias = Literal["pmesh", "gloo", "nccl", "mlx-ring", "jaccl"]
Backend: TypeAlias = Literal["pmesh"]
