"""`mesh.rpc`: calls of functions on other ranks, over the messages of `pmesh.p2p`."""
