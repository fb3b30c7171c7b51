"""Train a classifier of handwritten digits on several machines, with PyTorch's own DDP.

On each machine: `pmesh up`, then `PMESH_WAIT_FOR=3 python train_torch.py` where 3 machines take
part. But for one word this is a script for gloo: `init_process_group("pmesh")`.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pmesh.torch  # noqa: F401 - not needed where pmesh is installed and torch is 2.5 or later

EPOCHS, BATCH, RATE = 20, 32, 0.1


def main() -> None:
    """Every rank trains on its share; DDP averages the gradients."""
    dist.init_process_group("pmesh")
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    images = images.float() / 16
    data = TensorDataset(images[:1500], labels[:1500])
    sampler = DistributedSampler[tuple[torch.Tensor, ...]](data)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, BATCH, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: accuracy {right:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
