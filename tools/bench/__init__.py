"""How fast pmesh is beside others, what compression gains, and what it does to a training.

cases      what is measured, and the bars
systems    pmesh, gloo and MLX's ring as processes, on loopback or in a lab
worker     one rank: makes the calls that it is told, times and checks each
compressed the schemes by their names, what a worker compresses, the training beside torch
measuring  the turns: A B C A B C
soaking    memory and the event loop's lag while ops run for a while
results    what workers are told and answer, and what was measured
report     docs/explanation/benchmarks.md and compression-speed.md
kernels    the compression's kernels alone
training   what compression does to a training; models has what is trained
"""
