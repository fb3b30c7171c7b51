"""Who is who: keys, certificates, advertisements."""
