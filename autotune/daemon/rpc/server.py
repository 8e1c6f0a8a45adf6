"""The server of the daemon's unix socket: one thread with non-blocking connections.

A connection sends one line and receives one line, each within a deadline. When there are too many connections, the
server closes the one whose deadline is nearest.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.base.clock import Clock
from autotune.daemon.rpc.protocol import CALL_BYTES, RawReply, Reply, error_info, short_name
from autotune.base.errors import AutotuneError, MachineError, UsageError

log = logging.getLogger(__name__)

#: Time to receive a call, and time to send a reply.
LIMIT_S = 5.0
CONNECTIONS = 64
_BACKLOG = 512
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_CHUNK = 2**16


@dataclass
class _Connection:
    socket: socket.socket
    deadline: float
    received: bytes = b""
    reply: memoryview | None = None


class Server:
    """Accepts connections and replies to calls.

    Args:
        path: path of the socket. Its folder gets mode 0700. The lock on the daemon's state must be held.
        handle: returns the reply to a line. It runs in the thread that calls `serve`. An exception becomes an error
            reply.

    Raises:
        MachineError: the folder or the socket cannot be created, or the path is in use.
    """

    def __init__(self, path: Path, handle: Callable[[bytes], Reply | RawReply], clock: Clock) -> None:
        self._path = path
        self._handle = handle
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._wakers: set[int] = set()
        self._inode = 0
        self._connections: dict[int, _Connection] = {}
        #: Number of refused connections, for the metrics.
        self.refused = 0
        self._listener = self._listen()

    def wake_on(self, fileno: int) -> None:
        """Make `serve` return when this descriptor becomes readable. Its data is discarded."""
        self._selector.register(fileno, selectors.EVENT_READ)
        self._wakers.add(fileno)

    def serve(self, for_s: float) -> bool:
        """Wait up to ``for_s`` seconds for events and handle them. Returns after the first batch of events.

        Returns:
            Whether a descriptor of `wake_on` became readable.
        """
        woken = False
        for key, events in self._selector.select(for_s):
            if key.fd == self._listener.fileno():
                self._accept()
            elif key.fd in self._wakers:
                woken = True
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, _CHUNK)
            elif key.fd not in self._connections:
                # An earlier event of this batch has closed it to make room for another connection.
                continue
            elif events & selectors.EVENT_READ:
                self._receive(self._connections[key.fd])
            else:
                self._send(self._connections[key.fd])
        now = self._clock.now()
        for connection in [c for c in self._connections.values() if c.deadline < now]:
            self._refuse(connection, "too slow")
        return woken

    def is_in_place(self) -> bool:
        """Return whether the path still is this socket. A cleaner of temporary files may have removed it."""
        try:
            return os.stat(self._path).st_ino == int(self._inode)
        except OSError:
            return False

    def rebind(self, path: Path) -> None:
        """Create the socket again at ``path``, which may be a new one.

        Raises:
            MachineError: the socket cannot be created. The old one stays open.
        """
        before, listener, inode = self._path, self._listener, self._inode
        self._path = path
        try:
            self._listener = self._listen()
        except MachineError:
            self._path, self._inode = before, inode
            raise
        self._selector.unregister(listener)
        listener.close()

    @property
    def path(self) -> Path:
        """Path of the socket."""
        return self._path

    def close(self) -> None:
        """Close all connections and remove the socket."""
        for connection in list(self._connections.values()):
            self._drop(connection)
        if self.is_in_place():
            self._path.unlink(missing_ok=True)
        self._listener.close()
        self._selector.close()

    def _listen(self) -> socket.socket:
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.chmod(folder, 0o700)
            self._remove_stale_socket()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            with short_name(self._path) as name:
                listener.bind(name)
            os.chmod(self._path, 0o600)
            self._inode = os.stat(self._path).st_ino
            listener.listen(_BACKLOG)
        except OSError as error:
            raise MachineError(
                f"cannot listen at {self._path}: {error.strerror or error}",
                advice="the folder must be this user's own.",
            ) from error
        self._selector.register(listener, selectors.EVENT_READ)
        return listener

    def _remove_stale_socket(self) -> None:
        """Remove the socket of a process that no longer listens.

        Raises:
            MachineError: the path is not a socket of this user, or another process listens on it.
        """
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            raise MachineError(
                f"{self._path} is there, and is no socket of this user's", advice="move it out of the way."
            )
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            with short_name(self._path) as name:
                probe.connect(name)
        except ConnectionRefusedError:
            self._path.unlink()
            return
        except BlockingIOError:
            pass
        finally:
            probe.close()
        raise MachineError(
            f"another program listens at {self._path}", advice="end it; no other daemon uses this state folder."
        )

    def _accept(self) -> None:
        while True:
            try:
                found, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors or memory: the connection whose deadline is nearest makes room.
                if error.errno in _OUT_OF_RESOURCES and self._connections:
                    self._refuse(min(self._connections.values(), key=lambda c: c.deadline), "no room for another one")
                return
            found.setblocking(False)
            if _user_of(found) not in (os.geteuid(), 0):
                log.warning("a process of user %d was refused", _user_of(found))
                self.refused += 1
                found.close()
                continue
            if len(self._connections) >= CONNECTIONS:
                self._refuse(min(self._connections.values(), key=lambda c: c.deadline), "too many connections")
            connection = _Connection(found, self._clock.now() + LIMIT_S)
            self._connections[found.fileno()] = connection
            self._selector.register(found, selectors.EVENT_READ)
            # A call that has already arrived is handled before the next connection is accepted.
            self._receive(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            found = connection.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        connection.received += found
        line, end, _ = connection.received.partition(b"\n")
        if end:
            self._reply(connection, self._result(line))
        elif len(connection.received) > CALL_BYTES:
            self.refused += 1
            error = UsageError(f"a call has {CALL_BYTES} bytes at the most", advice="submit fewer jobs at once.")
            self._reply(connection, Reply(error=error_info(error)))
        elif not found:
            self._drop(connection)

    def _result(self, line: bytes) -> Reply | RawReply:
        try:
            return self._handle(line)
        except AutotuneError as error:
            return Reply(error=error_info(error))
        except Exception as error:
            log.exception("a call failed")
            fault = AutotuneError(f"a fault of autotune's own: {type(error).__name__}: {error}")
            return Reply(error=error_info(fault))

    def _reply(self, connection: _Connection, reply: Reply | RawReply) -> None:
        connection.reply = memoryview(reply.line())
        connection.deadline = self._clock.now() + LIMIT_S
        self._selector.modify(connection.socket, selectors.EVENT_WRITE)
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        assert connection.reply is not None
        try:
            sent = connection.socket.send(connection.reply)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        connection.reply = connection.reply[sent:]
        if not connection.reply:
            self._drop(connection)

    def _refuse(self, connection: _Connection, why: str) -> None:
        self.refused += 1
        log.debug("a connection was closed: %s", why)
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        fileno = connection.socket.fileno()
        if self._connections.pop(fileno, None) is not None:
            self._selector.unregister(connection.socket)
            connection.socket.close()


def _user_of(connection: socket.socket) -> int:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", found)
    return int(user)
