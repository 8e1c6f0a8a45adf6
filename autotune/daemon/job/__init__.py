"""One run of one job, in a process of its own, and what the daemon makes of it."""
