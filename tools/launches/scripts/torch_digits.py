"""Handwritten digits with DDP over gloo, as one writes it for torchrun: it knows no pmesh.

Usage: torch_digits.py DATA CHECKPOINT STEPS PAUSE
"""

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BATCH, SAVE_EVERY = 32, 5


def main(data: Path, checkpoint: Path, steps: int, pause_s: float) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    with np.load(data) as digits:
        x, y = torch.from_numpy(digits["images"]), torch.from_numpy(digits["labels"])
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 10)
    first = 0
    if checkpoint.exists():
        saved: dict[str, Any] = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        first = saved["step"]
        print(f"resumed at step {first}", flush=True)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    for step in range(first, steps):
        mine = (torch.arange(BATCH) * size + rank + step * BATCH * size) % len(x)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(ddp(x[mine]), y[mine]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if rank == 0 and (step + 1) % SAVE_EVERY == 0:
            written = checkpoint.with_suffix(".new")
            torch.save({"model": model.state_dict(), "step": step + 1}, written)
            written.replace(checkpoint)
        print(f"step {step}", flush=True)
        time.sleep(pause_s)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"trained {steps} {hashlib.sha256(weights).hexdigest()[:8]} {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
