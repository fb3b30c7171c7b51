"""Who sends what to whom, and what it costs."""
