"""The daemon: jobs wait in a queue and run when the machine is quiet.

It imports neither torch nor user code: each run of a job is a separate process (`autotune.daemon.job`).
"""
