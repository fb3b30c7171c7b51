"""`pmesh bridge entrenar`: workers of entrenar and ranks of a job average their gradients together.

A program beside the agent is entrenar's coordinator towards the workers and a rank towards the job.
The ranks call `pmesh.bridge.client.average_blocks`.
"""
