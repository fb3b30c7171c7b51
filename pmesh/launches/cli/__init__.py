"""The commands `pmesh run`, `ps`, `logs`, `fetch`, `stop` and `allow-run`."""
