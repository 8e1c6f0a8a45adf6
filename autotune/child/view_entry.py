"""Enters a copy-on-write view of a folder, and becomes the command. Run on its own, as a fresh process with one thread;
`autotune.child.script_folders` starts it. It imports only what loads quickly, since each launch waits for it.

Its arguments are those of `words`, followed by the command's. To a descriptor it writes a line ``entered``, or
``refused`` and why; after ``entered``, a line ``errno`` and a number if the command cannot be run.

The mounts belong to this process and its children alone, and vanish with the last of them. For a user who may not
mount, it does so in a user namespace, where the user keeps the same ids and has no more rights than before once the
command runs.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_BIND, _REC, _SLAVE = 0x1000, 0x4000, 0x80000
#: The map of ids in the initial user namespace.
_ALL_IDS = ["0", "0", "4294967295"]
_libc = ctypes.CDLL(None, use_errno=True)


def words(tell: int, folders: tuple[object, ...], kept: list[str], hidden: list[str]) -> list[str]:
    """Return what is to be entered as words of a command.

    Args:
        tell: the descriptor to write to.
        folders: the one to be viewed; two empty ones outside of it, on one file system, for what is written (an
            overlay's upper and work); and where the command runs.
        kept: files and folders below it that are left out of the view. hidden: files below it that the view is to lack.
    """
    return [str(tell), *map(str, folders), str(len(kept)), *kept, str(len(hidden)), *hidden]


def main(tell: int, folder: str, upper: str, work: str, runs_in: str, *more: str) -> NoReturn:
    """Enter the view, report that, and execute the command; without a command, only report."""
    os.set_inheritable(tell, False)
    kept, more = more[1 : 1 + int(more[0])], more[1 + int(more[0]) :]
    hidden, command = more[1 : 1 + int(more[0])], more[1 + int(more[0]) :]
    try:
        _enter(folder, upper, work, runs_in, kept, hidden)
    except Exception as error:
        why = f"{error.filename} ({error.strerror})" if isinstance(error, OSError) else repr(error)
        os.write(tell, f"refused {why}\n".encode(errors="replace"))
        os._exit(1)
    os.write(tell, b"entered\n")
    if not command:
        os._exit(0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(tell, f"errno {error.errno}\n".encode())
    os._exit(127)


def _enter(
    folder: str, upper: str, work: str, runs_in: str, kept_out: tuple[str, ...], hidden: tuple[str, ...]
) -> None:
    in_user = _unshare()
    # What is mounted elsewhere from now on is still visible here, but nothing of ours is visible there.
    _mount(None, "/", None, _REC | _SLAVE, None, "mounts cannot be its own")
    layers = {"lowerdir": folder, "upperdir": upper, "workdir": work}
    opened = {name: os.open(path, os.O_RDONLY | os.O_DIRECTORY) for name, path in layers.items()}
    _try_notes(opened["upperdir"], "user.autotune" if in_user else "trusted.autotune")
    # Opened before the folder is covered. An overlay leaves out whatever is mounted below it.
    kept = [(path, os.open(path, os.O_PATH)) for path in [*_mounted_below(folder), *kept_out]]
    # By descriptor, because a path may contain commas and colons. To rename folders, an overlay needs a right of root.
    options = [f"{name}=/proc/self/fd/{opened[name]}" for name in layers]
    options.append("userxattr" if in_user else "redirect_dir=on")
    _mount("overlay", folder, "overlay", 0, ",".join(options), "an overlay cannot be mounted")
    for path, descriptor in kept:
        _mount(f"/proc/self/fd/{descriptor}", path, None, _BIND | _REC, None, f"{path} cannot be kept")
    for descriptor in (*opened.values(), *(descriptor for _, descriptor in kept)):
        os.close(descriptor)
    # The current folder is still the one that has been covered.
    os.chdir(runs_in)
    for path in hidden:
        if os.path.lexists(path):
            os.unlink(path)


def _unshare() -> bool:
    """Give this process mounts of its own; return whether that took a user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    with open("/proc/self/uid_map") as file:
        is_root = uid == 0 and file.read().split() == _ALL_IDS
    if is_root and _libc.unshare(_NEWNS) == 0:
        return False
    _check(_libc.unshare(_NEWUSER | _NEWNS), "a user namespace cannot be made")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "a user namespace cannot be used") from None
    return True


def _try_notes(upper: int, name: str) -> None:
    """Raise if a folder does not support the attributes in which an overlay records what was removed."""
    try:
        os.setxattr(upper, name, b"1")
        os.removexattr(upper, name)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "the folder for temporary files cannot be used") from None


def _mounted_below(folder: str) -> list[str]:
    """Return what is mounted below a folder, except what is mounted below another such mount."""
    with open("/proc/self/mountinfo", "rb") as file:
        # Blanks and the like are written as \040.
        points = {os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")) for line in file}
    mounts: list[str] = []
    for point in sorted(points):
        if _is_in(point, folder) and not any(_is_in(point, other) for other in mounts):
            mounts.append(point)
    return [point for point in mounts if os.path.exists(point)]


def _is_in(path: str, folder: str) -> bool:
    return path.startswith(os.path.join(folder, ""))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None, what: str) -> None:
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(_libc.mount(*arguments[:3], ctypes.c_ulong(flags), arguments[3]), what)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno() or errno.EPERM
        raise OSError(number, os.strerror(number), what)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
