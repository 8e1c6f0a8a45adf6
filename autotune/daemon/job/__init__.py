"""Runs of jobs: the job's process, the daemon's handle on it, and the job's next state."""
