"""The jobs of an agent, their ranks, and the rules of an op."""
