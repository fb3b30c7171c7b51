"""The Unix socket, shared memory, processes and clocks of this machine."""
