"""Identities: keys, certificates, advertisements."""
