"""Which peers to dial, when to dial them, and what a silence means."""
