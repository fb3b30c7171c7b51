"""Connections between agents: listening, dialing, TLS, mDNS."""
