"""The other agents: whom to dial, one link to each, and the views agreed with them."""
