"""How long a training goes on, for the scripts here that end soon after a file has come."""


def batches(loader, options, more):
    """The batches of all epochs; with ``--until``, so many more after the file has come."""
    for _ in range(options.epochs):
        for batch in loader:
            yield batch
            if options.until is not None and options.until.exists():
                more -= 1
            if not more:
                return
