"""Which numbers of a job are charted, and how long they are kept."""
