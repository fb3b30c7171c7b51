"""The Unix socket, shared memory and clocks of this machine."""
