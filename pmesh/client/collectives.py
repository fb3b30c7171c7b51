"""All that a rank of a mesh or a group can call."""

from pmesh.client.averaging import Averaging
from pmesh.client.mail import Messages
from pmesh.client.moving import Moving
from pmesh.client.objects import Objects


class Collectives(Averaging, Moving, Objects, Messages):
    """The collectives, under the names of `torch.distributed` where they mean the same.

    They block until the result is there, and take an array of numpy, MLX or torch, where it makes
    sense also a (nested) dict, list or tuple of them. They return the same types and dtypes, bit
    for bit alike on every rank, and leave their arguments as they were. Every rank must make the
    same calls in the same order, whatever the library its arrays are of. With `async_op=True` they
    return a `Handle` at once; calls run in the order in which they were made. Messages between two
    ranks go beside them.
    """
