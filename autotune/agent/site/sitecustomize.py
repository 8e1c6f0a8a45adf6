"""Lets the agent into a script. Python imports this file at its start, because its folder comes first on PYTHONPATH.

The ``sitecustomize`` that would have been imported without it still runs. It runs first, so that the agent is the first
that Python asks for torch: a finder before it that leaves ``sys.meta_path`` when it is asked, as monitoring agents' do,
would have Python skip the next one. The folder leaves ``sys.path``, so that nothing in it is found by the script.
"""

import importlib.machinery
import importlib.util
import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _folder]
try:
    _theirs = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if _theirs is not None and _theirs.loader is not None:
        _module = importlib.util.module_from_spec(_theirs)
        sys.modules["sitecustomize"] = _module
        _theirs.loader.exec_module(_module)
finally:
    sys.path.insert(0, _folder)
    try:
        import autotune_agent

        autotune_agent.arm(_folder)
    except Exception as error:  # Whatever goes wrong here, the script runs.
        if sys.stderr is not None:
            # In words that older versions of Python understand: this file is read by each that the command starts.
            sys.stderr.write("autotune: nothing is set: " + type(error).__name__ + ": " + str(error) + "\n")
    sys.path.remove(_folder)
