"""The daemon's page: what runs and what waits, for looking at. A process of its own that asks the daemon like anybody.

Nothing can be changed here: there is no way to say anything but GET and HEAD, and what is read is opened for reading.
"""
