"""The daemon's socket: one call and one reply a connection."""
