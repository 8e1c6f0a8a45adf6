"""The daemon's read-only web page, served by a separate process that is a client of the daemon's socket.

The server accepts only GET and HEAD, and opens studies read-only.
"""
