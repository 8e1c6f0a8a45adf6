"""The socket's server, and the handlers of its calls."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import selectors
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base.clock import Clock, timestamp
from autotune.base.errors import AutotuneError, MachineError, UsageError
from autotune.base.layout import StudyFiles
from autotune.base.records import ENDED, SCHEMA_VERSION, Job, JobRequest, JobState
from autotune.base.version import __version__
from autotune.daemon.metrics import Metrics, exposition
from autotune.daemon.queue import Queue
from autotune.daemon.rpc.client import (
    CALL_BYTES,
    JobCall,
    ListJobs,
    RawReply,
    Reply,
    Retry,
    StatusCall,
    Stop,
    Submit,
    error_info,
    read_call,
    short_name,
)
from autotune.daemon.scheduler import Scheduler
from autotune.study.budget import Reservation, refuse_reserved, release, reservation_of, reserve

# The server of the daemon's unix socket: one thread with non-blocking connections.
#
# A connection sends one line and receives one line, each within a deadline. When there are too many connections, the
# server closes the one whose deadline is nearest.


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
        """Return whether the path is still this socket. A cleaner of temporary files may have removed it."""
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
            status = os.lstat(self._path)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
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
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors or memory: the connection whose deadline is nearest makes room.
                if error.errno in _OUT_OF_RESOURCES and self._connections:
                    self._refuse(min(self._connections.values(), key=lambda c: c.deadline), "no room for another one")
                return
            accepted.setblocking(False)
            if _user_of(accepted) not in (os.geteuid(), 0):
                log.warning("a process of user %d was refused", _user_of(accepted))
                self.refused += 1
                accepted.close()
                continue
            if len(self._connections) >= CONNECTIONS:
                self._refuse(min(self._connections.values(), key=lambda c: c.deadline), "too many connections")
            connection = _Connection(accepted, self._clock.now() + LIMIT_S)
            self._connections[accepted.fileno()] = connection
            self._selector.register(accepted, selectors.EVENT_READ)
            # A call that has already arrived is handled before the next connection is accepted.
            self._receive(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            chunk = connection.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        connection.received += chunk
        line, end, _ = connection.received.partition(b"\n")
        if end:
            self._reply(connection, self._result(line))
        elif len(connection.received) > CALL_BYTES:
            self.refused += 1
            error = UsageError(f"a call has {CALL_BYTES} bytes at the most", advice="submit fewer jobs at once.")
            self._reply(connection, Reply(error=error_info(error)))
        elif not chunk:
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
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


# Handlers for the calls of the RPC protocol.


class Handlers:
    """Handles calls. Runs on the daemon's main thread.

    Attributes:
        changed: a call has changed something, so that the scheduler should tick soon.
        notes: repairs made since the daemon started, for ``autotune daemon status``.
    """

    def __init__(self, queue: Queue, scheduler: Scheduler, clock: Clock, notes: tuple[str, ...] = ()) -> None:
        self.changed = False
        #: Returns the address of the web page, or why it is not served; ``None`` if it is disabled.
        self.page: Callable[[], str | None] = lambda: None
        self.notes = notes
        self.refused = 0
        self._queue = queue
        self._scheduler = scheduler
        self._clock = clock
        self._began = clock.now()
        self._started = timestamp()

    def handle(self, line: bytes) -> Reply | RawReply:
        """Handle one call and return the reply.

        Raises:
            AutotuneError: the call is invalid or failed.
        """
        result = self._result(read_call(line))
        return result if isinstance(result, RawReply) else Reply(result=result)

    def metrics(self) -> str:
        """Return the metrics in the Prometheus text format."""
        return exposition(
            Metrics(
                jobs=self._queue.counts(),
                devices=dict(self._scheduler.board.states),
                taken={name: job.id for name, job in self._scheduler.taken().items()},
                reads=self._scheduler.board.reads,
                uptime_s=self._clock.now() - self._began,
                trouble=self._scheduler.trouble,
                refused=self.refused,
                ended=dict(self._scheduler.ended_runs),
            )
        )

    def _result(self, call: Any) -> dict[str, Any] | RawReply:
        if isinstance(call, ListJobs):
            waits = self._scheduler.waiting() if JobState.QUEUED in call.states else {}
            return RawReply(f'{{"jobs": {self._queue.rows(call.states)}, "waits": {json.dumps(waits)}}}')
        if isinstance(call, StatusCall):
            return {"metrics": self.metrics()} if call.op == "metrics" else self.status()
        if isinstance(call, JobCall) and call.op == "show":
            job = self._queue.job(call.id)
            return {"job": job.model_dump(mode="json"), "waits": self._scheduler.waits_for(job)}
        self.changed = True
        if isinstance(call, Stop):
            self._scheduler.stop(now=call.now)
            return {"pid": os.getpid()}
        if isinstance(call, Submit):
            return {"jobs": [job.model_dump(mode="json") for job in self.submit(*call.requests)]}
        if isinstance(call, Retry):
            return {"job": self._retry(call).model_dump(mode="json")}
        scheduler = self._scheduler
        actions = {
            "cancel": scheduler.cancel,
            "pause": scheduler.pause,
            "resume": scheduler.resume,
            "let-go": scheduler.let_go,
        }
        return {"job": actions[call.op](call.id).model_dump(mode="json")}

    def status(self) -> dict[str, Any]:
        """Return what ``autotune daemon status --json`` prints."""
        scheduler, taken = self._scheduler, self._scheduler.taken()
        state = "stopping" if scheduler.stopping else "waiting" if scheduler.trouble else "running"
        return {
            "schema_version": SCHEMA_VERSION,
            "pid": os.getpid(),
            "state": state,
            "trouble": scheduler.trouble,
            "version": __version__,
            "started": self._started,
            "uptime_s": round(self._clock.now() - self._began, 1),
            "jobs": {state.value: count for state, count in self._queue.counts().items()},
            "devices": [
                {
                    "name": name,
                    "model": device.reading.model,
                    "state": device.label if name not in taken else "running",
                    "job": taken[name].id if name in taken else None,
                    "why": scheduler.board.obstacle(name, taken),
                }
                for name, device in scheduler.board.states.items()
            ],
            "page": self.page(),
            "notes": list(self.notes),
        }

    def submit(self, *requests: JobRequest) -> list[Job]:
        """Submit jobs, all or none. Studies without a name get one.

        Raises:
            UsageError: a study already exists or belongs to another job.
            MachineError: the daemon is stopping, or the queue cannot be written.
        """
        if self._scheduler.stopping:
            raise MachineError("the daemon is being stopped", advice="submit again when one runs.")
        studies = [(r.studies_dir, r.spec.name) for r in requests if r.spec.name]
        twice = next((name for folder, name in studies if studies.count((folder, name)) > 1), None)
        if twice is not None:
            raise UsageError(f"study {twice!r} is asked for twice")
        named_requests: list[JobRequest] = []
        try:
            for request in requests:
                # Requests of the same call have no row yet.
                others = {r.spec.name for r in named_requests if r.studies_dir == request.studies_dir}
                named_requests.append(self._named(request, others))
            return self._queue.submit_all(named_requests, self._reserve)
        except BaseException:
            for request in named_requests:
                self._release(request)
            raise

    def _named(self, request: JobRequest, others: set[str]) -> JobRequest:
        """Return the request with a unique study name."""
        name = request.spec.name
        if self._queue.is_known(request.spec.mark):
            return request
        if name:
            files = StudyFiles(Path(request.studies_dir) / name)
            paths = list(files.folder.iterdir()) if request.replay is None and files.folder.is_dir() else []
            if any(path != files.reservation for path in paths):
                raise UsageError(f"study {name!r} exists already", advice="another --study starts a new one.")
            return request
        name = next(n for n in _names(request) if n not in others and self._take(request, n))
        return request.model_copy(update={"spec": request.spec.model_copy(update={"name": name})})

    def _take(self, request: JobRequest, name: str) -> bool:
        """Claim a study's name, if it is free, by creating its folder, as a search on the command line does."""
        folder = Path(request.studies_dir) / name
        if folder.exists() or self._queue.is_taken(str(folder)):
            return False
        if request.replay is None:
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                return False
            except OSError as error:
                raise MachineError(
                    f"cannot make {folder}: {error.strerror}", advice="--studies-dir names another folder."
                ) from error
        return True

    def _reserve(self, job: Job) -> None:
        """Reserve the study's folder for the job, so that no search on the command line takes it meanwhile."""
        if job.request.replay is not None:
            return
        files, mark = StudyFiles(Path(job.request.studies_dir) / job.request.spec.name), job.request.spec.mark
        self._refuse_reserved(files, mark)
        reserve(files, Reservation(job=job.id, mark=mark, daemon=str(self._queue.files.folder)))

    def _refuse_reserved(self, files: StudyFiles, mark: str) -> None:
        reservation = reservation_of(files)
        # A daemon that was killed before it acknowledged a job leaves a reservation without a job.
        is_ours = reservation is not None and reservation.daemon == str(self._queue.files.folder)
        if reservation is None or not is_ours or self._queue.is_known(reservation.mark):
            refuse_reserved(files, mark)

    def _release(self, request: JobRequest) -> None:
        """Give up the name of a request that was not acknowledged."""
        # If the queue cannot be read, the folder is left: a job may be behind it.
        with contextlib.suppress(AutotuneError):
            if request.replay is None and request.spec.name and not self._queue.is_known(request.spec.mark):
                release(StudyFiles(Path(request.studies_dir) / request.spec.name), request.spec.mark)

    def _retry(self, call: Retry) -> Job:
        """Queue a job again. Its folder is reserved again if its study has no request, or was removed."""
        job = self._queue.job(call.id)
        study = StudyFiles(Path(job.request.studies_dir) / job.request.spec.name)
        if job.state in ENDED and not study.request.exists():
            self._reserve(job)
        return self._scheduler.retry(call.id, call.sources)


def _names(request: JobRequest) -> Iterator[str]:
    return (f"{request.label}-{number}" for number in itertools.count(1))
