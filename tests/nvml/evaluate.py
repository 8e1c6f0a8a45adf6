"""Evaluates lines of JSON, each a Python statement or expression, and prints the values as JSON.

Runs in its own process, because a process loads the driver's library only once, from the place it was given at its
start.
"""

import dataclasses
import json
import sys

from autotune.base.clock import SystemClock
from autotune.base.records import Surroundings
from autotune.child import windows
from autotune.cli import doctor
from autotune.machine import gpu
from autotune.search import request

names = {
    "gpu": gpu,
    "devices": request,
    "doctor": doctor,
    "surroundings": windows,
    "Surroundings": Surroundings,
    "clock": SystemClock(),
}


def plain(value):
    """Convert a record to a dictionary that includes its class name."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return {"is": type(value).__name__, **{f.name: getattr(value, f.name) for f in dataclasses.fields(value)}}


for line in sys.stdin:
    code = json.loads(line)
    try:
        try:
            answer = {"value": eval(code, names)}
        except SyntaxError:
            answer = {"value": exec(code, names)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer, default=plain), flush=True)
