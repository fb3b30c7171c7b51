"""`pmesh invite` and `pmesh join`: a new machine gets the mesh key by a short code, used once."""
