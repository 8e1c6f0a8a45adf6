"""Lets the agent into a script. Python imports this file at its start, because its folder comes first on PYTHONPATH.

The ``sitecustomize`` that would have been imported without it still runs. The folder leaves ``sys.path`` at once, so
that nothing in it is found by the script.
"""

import importlib.machinery
import importlib.util
import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))
try:
    import autotune_agent

    autotune_agent.arm(_folder)
except Exception as error:  # Whatever goes wrong here, the script runs.
    if sys.stderr is not None:
        # In words that older versions of Python understand: this file is read by each that the command starts.
        sys.stderr.write("autotune: nothing is set: " + type(error).__name__ + ": " + str(error) + "\n")
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _folder]

_theirs = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _theirs is not None and _theirs.loader is not None:
    _module = importlib.util.module_from_spec(_theirs)
    sys.modules["sitecustomize"] = _module
    _theirs.loader.exec_module(_module)
