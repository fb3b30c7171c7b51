"""Compression: pure kernels, from numpy arrays to bytes and back. No I/O, no clock, no dice.

codecs      what a hop of the ring computes, and which codecs there are: casts (fp16, bf16) and
            int8, both on top of hops; draws (lots for stochastic rounding)
"""
