"""``write_jobs.py FOLDER SEED``: submit and move jobs forever, and print each change when it is acknowledged."""

import random
import sys
from pathlib import Path

from autotune.base.layout import QueueFiles
from autotune.base.records import JobState, Queued, Running
from autotune.daemon.queue import open_queue
from tests.support import make_job_request

queue = open_queue(QueueFiles(Path(sys.argv[1]))).queue
rng = random.Random(int(sys.argv[2]))
number = 0
while True:
    number += 1
    print(queue.submit(make_job_request(study=f"net-{number}")).model_dump_json(), flush=True)
    chosen = rng.randint(1, number)
    job = queue.job(chosen)
    running = job.state is JobState.RUNNING
    to = Queued(why="a neighbour") if running else Running(since="now", device="cpu", boot_id="boot", mark="run")
    print(queue.move(chosen, job.state, to, runs=job.runs + 1).model_dump_json(), flush=True)
