"""Connections between agents: listening, dialling, TLS, mDNS."""
