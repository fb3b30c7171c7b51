"""Train a classifier of handwritten digits with DDP on machines that come and go.

On each machine: `pmesh up`, then `PMESH_WAIT_FOR=3 pmesh run python train_torch_elastic.py` where 3
machines are to begin. One that is lost in the middle comes back by itself; another may enter.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import pmesh.torch
from pmesh.torch import DistributedDataParallel

EPOCHS, BATCH, RATE, TRAINED = 20, 96, 0.1, 1500


def main() -> None:
    """Every rank trains on its share; DDP averages the gradients of those who are there."""
    mesh = pmesh.torch.init(elastic=True)
    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    images = images.float() / 16
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    place = {"epoch": 0, "position": 0}
    while place["epoch"] < EPOCHS:
        pmesh.torch.sync(model, optimizer, place)  # newcomers enter here, and get all of these
        mine = mesh.batch(TRAINED, BATCH, **place)
        model.gradient_weight = len(mine)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        place["position"] += BATCH
        if place["position"] + BATCH > TRAINED:
            place.update(epoch=place["epoch"] + 1, position=0)
    right = (model(images[TRAINED:]).argmax(1) == labels[TRAINED:]).float().mean().item()
    print(f"rank {mesh.rank} of {mesh.size}: accuracy {right:.1%}")
    mesh.close()


if __name__ == "__main__":
    main()
