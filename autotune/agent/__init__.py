"""What enters somebody else's script: only torch and the standard library.

The folder `site` goes in front of ``PYTHONPATH`` (see `autotune.launcher.script_entry`). Python imports its
``sitecustomize`` at the start of every process, which arms the package ``autotune_agent``. Nothing of autotune imports
either.
"""
