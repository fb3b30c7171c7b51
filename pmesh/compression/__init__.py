"""Compression: pure kernels, from numpy arrays to bytes and back. No I/O, no clock, no dice.

The agent runs ring codecs at every hop; the trainer runs the other schemes around ordinary ops:

what            arrays (the types), parts (pieces that fit in a cache)
ring codecs     codecs (what a hop computes, and which there are), casts (fp16, bf16) and int8, both
                on top of hops; draws (lots that need no state)
schemes         schemes (the user's objects), top_k and random_k, one_bit, power_sgd
fast            twins of some kernels in numba: the same bits in less time
"""
