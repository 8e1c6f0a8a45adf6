"""The daemon's jobs: a SQLite file that only the daemon writes, and a folder for each job.

What `submit` and `move` return is on disk and survives a crash and a loss of power: every change is one immediate
transaction of a connection that syncs each commit. Beside the row each job's folder holds the same as ``job.json``,
written before the commit. Where the file is damaged it is set aside under a new name and made again from the folders
(`open_queue`), so that there is never a silently empty queue.

    queue = open_queue(QueueFiles(folder))
    job = queue.submit(request)
    queue.move(job.id, JobState.QUEUED, Running(since=timestamp(), device="cpu", …))
"""

from autotune.daemon.queue.jobs import Queue
from autotune.daemon.queue.opening import Opened, open_queue

__all__ = ["Opened", "Queue", "open_queue"]
