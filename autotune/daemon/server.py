"""The socket's server, and the handlers of its calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autotune.base.clock import Clock, timestamp
from autotune.base.errors import AutotuneError, MachineError, UsageError
from autotune.base.layout import StudyFiles
from autotune.base.records import ENDED, SCHEMA_VERSION, Job, JobRequest, JobState
from autotune.base.version import __version__
from autotune.daemon.client import (
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
from autotune.daemon.queue import Queue
from autotune.daemon.scheduler import Scheduler
from autotune.study.budget import Reservation, refuse_reserved, release, reservation_of, reserve

log = logging.getLogger(__name__)

#: Time to receive a call, and time to send a reply.
LIMIT_S = 5.0
CONNECTIONS = 64
_BACKLOG = 512
_CHUNK = 2**16


class Server:
    """Accepts connections and replies to calls, in the thread that calls `serve`.

    A connection sends one line and receives one line, each within a deadline. When there are too many connections, the
    one whose deadline is nearest is closed.

    Args:
        path: path of the socket. Its folder gets mode 0700. The lock on the daemon's state must be held.
        handle: returns the reply to a line. An exception becomes an error reply.

    Attributes:
        refused: number of refused connections, for the metrics.

    Raises:
        MachineError: the folder or the socket cannot be created, or the path is in use.
    """

    def __init__(self, path: Path, handle: Callable[[bytes], Reply | RawReply]) -> None:
        self.path = path
        self.refused = 0
        self._handle = handle
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._warn)
        #: A call was handled, or (`_woken`) a descriptor of `wake_on` became readable.
        self._event = asyncio.Event()
        self._woken = False
        #: The tasks of the open connections, the nearest deadline first.
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._server, self._inode = self._listen(path)

    def wake_on(self, fileno: int) -> None:
        """Make `serve` return when this descriptor becomes readable. Its data is discarded."""

        def wake() -> None:
            with contextlib.suppress(BlockingIOError):
                os.read(fileno, _CHUNK)
            self._woken = True
            self._event.set()

        self._loop.add_reader(fileno, wake)

    def serve(self, for_s: float) -> bool:
        """Reply to calls for up to ``for_s`` seconds, but only until one was handled.

        Returns:
            Whether a descriptor of `wake_on` became readable.
        """
        with contextlib.suppress(TimeoutError):
            self._loop.run_until_complete(asyncio.wait_for(self._event.wait(), for_s))
        woken, self._woken = self._woken, False
        self._event.clear()
        return woken

    def is_in_place(self) -> bool:
        """Return whether the path is still this socket. A cleaner of temporary files may have removed it."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except OSError:
            return False

    def rebind(self, path: Path) -> None:
        """Create the socket again at ``path``, which may be a new one.

        Raises:
            MachineError: the socket cannot be created. The old one stays open.
        """
        before = self._server
        self._server, self._inode = self._listen(path)
        self.path = path
        before.close()

    def close(self) -> None:
        """Close all connections and remove the socket."""
        if self.is_in_place():
            self.path.unlink(missing_ok=True)
        self._server.close()
        self._loop.run_until_complete(self._end_all())
        self._loop.close()

    async def _end_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)

    def _listen(self, path: Path) -> tuple[asyncio.AbstractServer, int]:
        """Return what listens at a path, and the inode of its socket."""
        folder = path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.chmod(folder, 0o700)
            _remove_stale_socket(path)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            with short_name(path) as name:
                listener.bind(name)
            os.chmod(path, 0o600)
            inode = os.stat(path).st_ino
            # asyncio accepts as many as its backlog in one go: with one, a call that has arrived is replied to before
            # later connections make it one too many. The kernel lets more wait.
            starting = asyncio.start_unix_server(self._serve_one, sock=listener, backlog=1, limit=CALL_BYTES)
            server = self._loop.run_until_complete(starting)
            listener.listen(_BACKLOG)
            return server, inode
        except OSError as error:
            raise MachineError(
                f"cannot listen at {path}: {error.strerror or error}",
                advice="the folder must be this user's own.",
            ) from error

    def _warn(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log what asyncio reports. For want of descriptors or memory, it accepts again a second later."""
        error = context.get("exception")
        log.warning("the socket: %s", context["message"], exc_info=error)
        if isinstance(error, OSError):
            self._make_room()

    def _make_room(self) -> None:
        """Close the connection whose deadline is nearest."""
        if nearest := next(iter(self._tasks), None):
            del self._tasks[nearest]
            nearest.cancel()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reply to the call of a connection, and close it."""
        task = asyncio.current_task()
        assert task is not None
        try:
            user = _user_of(writer.get_extra_info("socket"))
            if user not in (os.geteuid(), 0):
                log.warning("a process of user %d was refused", user)
                self.refused += 1
                return
            if len(self._tasks) >= CONNECTIONS:
                self._make_room()
            self._tasks[task] = None
            async with asyncio.timeout(LIMIT_S):
                reply = await self._reply_to(reader)
            if reply is None:
                return
            del self._tasks[task]
            self._tasks[task] = None
            # Without a buffer that may stay filled, `drain` waits until everything is sent.
            writer.transport.set_write_buffer_limits(0)
            async with asyncio.timeout(LIMIT_S):
                writer.write(reply.line())
                await writer.drain()
        except (TimeoutError, asyncio.CancelledError):
            self.refused += 1
        except OSError:
            # The client has left.
            pass
        finally:
            self._tasks.pop(task, None)
            writer.transport.abort()

    async def _reply_to(self, reader: asyncio.StreamReader) -> Reply | RawReply | None:
        """Return the reply to the line that a connection sends; ``None`` if it ends before."""
        try:
            line = await reader.readline()
        except ValueError:
            self.refused += 1
            error = UsageError(f"a call has {CALL_BYTES} bytes at the most", advice="submit fewer jobs at once.")
            return Reply(error=error_info(error))
        if not line.endswith(b"\n"):
            return None
        self._event.set()
        try:
            return self._handle(line[:-1])
        except AutotuneError as error:
            return Reply(error=error_info(error))
        except Exception as error:
            log.exception("a call failed")
            fault = AutotuneError(f"a fault of autotune's own: {type(error).__name__}: {error}")
            return Reply(error=error_info(fault))


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket of a process that no longer listens."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise MachineError(f"{path} is there, and is no socket of this user's", advice="move it out of the way.")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with short_name(path) as name:
            probe.connect(name)
    except ConnectionRefusedError:
        path.unlink()
        return
    except BlockingIOError:
        pass
    finally:
        probe.close()
    raise MachineError(f"another program listens at {path}", advice="end it; no other daemon uses this state folder.")


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


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
        return exposition(self._scheduler, self._clock.now() - self._began, self.refused)

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
        # The scheduler's methods are called as the operations are: cancel, pause, resume, let_go.
        return {"job": getattr(self._scheduler, call.op.replace("-", "_"))(call.id).model_dump(mode="json")}

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


# The daemon's metrics in the Prometheus text format (exposition format 0.0.4).


def exposition(scheduler: Scheduler, uptime_s: float, refused: int) -> str:
    """Return the daemon's metrics as text."""
    lines: list[str] = []
    devices, taken = scheduler.board.states, scheduler.taken()

    def family(name: str, kind: str, meaning: str, samples: list[tuple[dict[str, str], float]]) -> None:
        lines.extend((f"# HELP autotune_{name} {meaning}", f"# TYPE autotune_{name} {kind}"))
        for labels, value in samples:
            text = ",".join(f'{label}="{_escaped(content)}"' for label, content in labels.items())
            lines.append(f"autotune_{name}{{{text}}} {value:g}" if text else f"autotune_{name} {value:g}")

    def of_devices(state: str, meaning: str) -> None:
        """Add 1 for each device in the state, and 0 for the others."""
        samples = [
            ({"device": name, "model": s.reading.model}, float(("running" if name in taken else s.label) == state))
            for name, s in devices.items()
        ]
        family(f"device_{state}", "gauge", meaning, samples)

    family("jobs", "gauge", "Jobs by state.", [({"state": s.value}, n) for s, n in scheduler.queue.counts().items()])
    family(
        "runs_ended_total",
        "counter",
        "Runs of jobs that have ended, by what their job became.",
        [({"state": s.value}, scheduler.ended_runs[s]) for s in JobState if s is not JobState.RUNNING],
    )
    of_devices("running", "A job of ours runs on the device.")
    of_devices("idle", "Nobody uses the device.")
    of_devices("unknown", "It cannot be found out who uses the device.")
    of_devices("quarantined", "Memory is in use and no process is there that uses it.")
    family("device_readings_total", "counter", "How often all devices were read.", [({}, scheduler.board.reads)])
    family("trouble", "gauge", "Nothing can be started.", [({}, float(scheduler.trouble is not None))])
    family("connections_refused_total", "counter", "Connections that were refused or cut off.", [({}, refused)])
    family("uptime_seconds", "gauge", "Since the daemon was started.", [({}, uptime_s)])
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
