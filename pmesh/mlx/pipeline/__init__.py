"""Training a model in stages: each rank computes some of its layers.

`rules` has the schedules, how long they take, and how layers are split, all pure. `stages` cuts a
model, `passes` computes one stage on one micro-batch, `pipeline` carries out a step.
"""
