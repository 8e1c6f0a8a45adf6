"""Lines of JSON in, each a statement or an expression of Python over the product; its value comes back as JSON.

A process of its own, because the driver's library is bound once in a process, and found where that process was told
to look when it started.
"""

import dataclasses
import json
import sys

from autotune.child import surroundings
from autotune.cli import doctor
from autotune.clock import SystemClock
from autotune.machine import gpu
from autotune.records import Surroundings

names = {
    "gpu": gpu,
    "doctor": doctor,
    "surroundings": surroundings,
    "Surroundings": Surroundings,
    "clock": SystemClock(),
}


def plain(value):
    """A record as a dictionary, with the name of its class."""
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
