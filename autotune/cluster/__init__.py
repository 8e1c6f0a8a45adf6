"""Queues of others: searches as jobs of a cluster's own scheduler. Nothing here schedules."""
