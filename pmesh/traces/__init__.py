"""`pmesh trace`: the latest calls of all ranks of a job on one clock, as a file for Perfetto."""
