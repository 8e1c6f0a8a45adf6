"""The daemon's job queue: a SQLite file that only the daemon writes, and a folder for each job.

When `submit` or `move` returns, the change is on disk and survives a crash or power loss: every change is one immediate
transaction, and every commit is synced. Each job's folder holds a copy of its row in ``job.json``, written before the
commit. A damaged database is renamed and rebuilt from these copies (`open_queue`), so the queue is never silently
empty.

    queue = open_queue(QueueFiles(folder))
    job = queue.submit(request)
    queue.move(job.id, JobState.QUEUED, Running(since=timestamp(), device="cpu", …))
"""

from autotune.daemon.queue.jobs import Opened, Queue, open_queue

__all__ = ["Opened", "Queue", "open_queue"]
