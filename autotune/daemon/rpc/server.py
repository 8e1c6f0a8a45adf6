"""The daemon's unix socket: many connections, one thread, and nobody who can hold it up.

A connection brings one line and gets one line. It has a deadline for each; when there are too many, the one that has
waited longest without a word goes first.
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

from autotune.clock import Clock
from autotune.daemon.rpc.protocol import CALL_BYTES, RawReply, Reply, short_name, trouble_of
from autotune.errors import AutotuneError, MachineError, UsageError

log = logging.getLogger(__name__)

#: A call has to be here, and a reply taken, in so many seconds.
LIMIT_S = 5.0
CONNECTIONS = 64
_BACKLOG = 512
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_CHUNK = 2**16


@dataclass
class _Connection:
    socket: socket.socket
    deadline: float
    received: bytes = b""
    reply: memoryview | None = None


class Server:
    """Answers calls.

    Args:
        path: of the socket. Its folder is made for this user alone; the lock on the daemon's state must be held.
        answer: the reply to a line. Called in the thread that calls `serve`; whatever it raises becomes an error.

    Raises:
        MachineError: the folder or the socket cannot be made, or something else is in the socket's place.
    """

    def __init__(self, path: Path, answer: Callable[[bytes], Reply | RawReply], clock: Clock) -> None:
        self._path = path
        self._answer = answer
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._wakers: set[int] = set()
        self._inode = 0
        self._connections: dict[int, _Connection] = {}
        #: Raised for whoever was refused, for the metrics.
        self.refused = 0
        self._listener = self._listen()

    def wake_for(self, fileno: int) -> None:
        """Let `serve` return when this descriptor can be read; what is in it is thrown away."""
        self._selector.register(fileno, selectors.EVENT_READ)
        self._wakers.add(fileno)

    def serve(self, for_s: float) -> bool:
        """Serve whoever is there, for so long at the most; return earlier when something happened.

        Returns:
            Whether it was woken by another descriptor.
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
                # Closed since the selector saw it, to make room for another one.
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
        """Whether the socket's path still leads here: a cleaner of temporary files may have taken it."""
        try:
            return os.stat(self._path).st_ino == int(self._inode)
        except OSError:
            return False

    def listen_again(self, path: Path) -> None:
        """Make the socket anew, there or elsewhere.

        Raises:
            MachineError: it cannot be made there; it is as it was before.
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
        """Where it listens."""
        return self._path

    def close(self) -> None:
        """Answer nobody any more."""
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
            self._clear_the_way()
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

    def _clear_the_way(self) -> None:
        """Remove a socket at which nobody listens."""
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
                # No descriptor or no memory for one more: whoever has waited longest makes room.
                if error.errno in _SHORT and self._connections:
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
            # Who has said all in the moment of coming is answered before anybody else comes.
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
            self._reply(connection, self._answered(line))
        elif len(connection.received) > CALL_BYTES:
            self.refused += 1
            error = UsageError(f"a call has {CALL_BYTES} bytes at the most", advice="submit fewer jobs at once.")
            self._reply(connection, Reply(error=trouble_of(error)))
        elif not found:
            self._drop(connection)

    def _answered(self, line: bytes) -> Reply | RawReply:
        try:
            return self._answer(line)
        except AutotuneError as error:
            return Reply(error=trouble_of(error))
        except Exception as error:
            log.exception("a call failed")
            fault = AutotuneError(f"a fault of autotune's own: {type(error).__name__}: {error}")
            return Reply(error=trouble_of(fault))

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
