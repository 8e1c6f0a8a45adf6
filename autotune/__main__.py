"""``python -m autotune``: the same as the console script."""

from autotune.cli.main import main

main()
