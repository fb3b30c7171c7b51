"""The other agents: targets to dial, one link to each, and the views agreed with them."""
