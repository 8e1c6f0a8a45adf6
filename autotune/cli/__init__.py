"""The command line, one file per command. `main` registers the commands."""
