"""Fakes that users may test with too: a seeded network, a virtual cluster."""
