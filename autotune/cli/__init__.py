"""The command line: one file per command, each short; `main` is the table of contents."""
