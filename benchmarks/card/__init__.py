"""One command that turns half an hour on a card into evidence: `python -m benchmarks.card`.

`command` plans the parts of `parts.PARTS` into the minutes given, runs each in a process of its own (`inside`), and
appends one line to the results for each. A part gets a `stage.Stage`: the device, the sizes, and where figures go.
"""
