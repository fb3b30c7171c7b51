"""The program `pmesh bridge entrenar`: its options, and the workers' connections."""
