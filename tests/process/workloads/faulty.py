"""A training of milliseconds that goes wrong in the way and at the place that its arguments say."""

import atexit
import ctypes
import mmap
import os
import signal
import time

import torch
from torch import nn

BATCH_SIZE = 8
#: `fault` names a function of this file; `at` is load, build, the number of a step from 1, exit, worker, or next worker
#: (one that is forked after the first step).
ARGS = {"fault": "none", "at": "load", "sample_bytes": "64", "samples": "4096"}

_steps = 0


def at(ctx, place):
    if ctx.arg("at") == str(place) and ctx.arg("fault") != "none":
        globals()[ctx.arg("fault")]()


def raise_an_error():
    raise ValueError("the labels are wrong")


def segfault():
    ctypes.string_at(0)


def abort():
    os.abort()


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def leave_with_0():
    os._exit(0)


def leave_politely():
    raise SystemExit(0)


def sleep_for_ever():
    while True:
        time.sleep(1000)


def ignore_sigterm_and_sleep():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_for_ever()


def eat_memory():
    hoard = []
    for _ in range(16):
        hoard.append(torch.ones(32 * 2**20 // 4))
    raise AssertionError(f"{len(hoard)} blocks fitted: there is no limit")


def eat_memory_outside_torch():
    hoard = []
    for _ in range(16):
        hoard.append(b"x" * 32 * 2**20)
    raise AssertionError(f"{len(hoard)} blocks fitted: there is no limit")


def outgrow_shared_memory():
    """Pages are handed out as they are touched, and the one too many is deadly."""
    with open("/dev/shm/outgrown", "w+b") as stream:
        stream.truncate(64 * 2**20)
        with mmap.mmap(stream.fileno(), 0) as pages:
            for start in range(0, len(pages), mmap.PAGESIZE):
                pages[start] = 1


def break_the_graph():
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    torch.compile(broken, fullgraph=True, backend="eager")(torch.ones(2))


def result_file():
    return os.path.join(os.path.dirname(os.readlink("/proc/self/fd/2")), "result.json")


def a_list_for_a_result():
    with open(result_file(), "w") as stream:
        stream.write("[1, 2, 3]")
    os._exit(0)


def scribble_on_the_beats():
    for descriptor in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:"):
                os.write(descriptor, b'{"phase": "load"}x\n\xff\xfe{}\n' + b"y" * 10000 + b"\n")
        except OSError:
            continue


class Samples(torch.utils.data.Dataset):
    def __init__(self, ctx):
        self.ctx = ctx
        self.features = torch.randn(int(ctx.arg("sample_bytes")) // 4)

    def __len__(self):
        return int(self.ctx.arg("samples"))

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            at(self.ctx, "worker")
            if _steps:
                at(self.ctx, "next worker")
        return self.features.clone(), index % 4


def dataset(ctx):
    at(ctx, "load")
    if ctx.arg("at") == "exit":
        atexit.register(lambda: at(ctx, "exit"))
    return Samples(ctx)


def model(ctx):
    at(ctx, "build")
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def optimizer(ctx, model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(ctx, model, batch):
    global _steps
    _steps += 1
    at(ctx, _steps)
    features, labels = batch
    value = nn.functional.cross_entropy(model(features[:, :16]), labels)
    return value * float("nan") if ctx.arg("fault") == "nan" and ctx.arg("at") == str(_steps) else value


def nan():
    """The loss itself is spoilt; nothing happens beside it."""
