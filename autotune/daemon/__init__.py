"""The daemon: jobs wait in a queue, and run when the machine is quiet.

It imports neither torch nor anybody's code: each run of a job is a process of its own (`autotune.daemon.job.__main__`).
"""
