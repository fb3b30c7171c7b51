"""`mesh.rpc`."""
