"""Compression: pure kernels, from numpy arrays to bytes and back. No I/O, clock or randomness.

The agent runs ring codecs at every hop; the trainer runs the other schemes around ordinary ops:

blocks          array types, and pieces that fit in a cache
ring codecs     codecs (the protocol of a hop; fp16, bf16 and int8), draws (counter-based random
                numbers)
schemes         schemes (the user's objects), top_k and random_k, one_bit, power_sgd
compiled        some kernels in C, of the native library: the same bits in less time
"""
