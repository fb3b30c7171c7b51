"""Composition: the one nursery, the configuration, the picture that others read."""
