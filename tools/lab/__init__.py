"""What all campaigns and benchmarks stand on: hosts, agents, trainers, results, tables."""
