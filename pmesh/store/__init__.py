"""`mesh.store`: the replicated keys and values of a job (S1 to S4)."""
