"""``python -m benchmarks.card``."""

from benchmarks.card.command import main

main()
