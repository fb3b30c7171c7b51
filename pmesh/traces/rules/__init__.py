"""Which ops an agent tells, and how the ops of all ranks become one timeline, and a file."""
