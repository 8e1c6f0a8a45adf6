"""The study: suggest, launch and record trials until the budget is spent or the space is exhausted. Prints nothing.

`loop.StudyLoop` is the loop, `history` stores the trials, `budget` counts the time used, and `launches` starts
processes.
"""
