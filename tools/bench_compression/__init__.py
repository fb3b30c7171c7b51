"""Compressed all-reduces beside uncompressed ones, and training beside DDP's powerSGD_hook."""
