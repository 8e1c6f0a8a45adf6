"""The folders that a launch of a script has for itself, what its words and variables mean in one of them, and an
environment in which experiment trackers are silent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.base.layout import LaunchFiles
from autotune.base.records import CommandRef

#: Options of Python by which the current folder is a place to import from.
_IMPORTS = ("-m", "-c")
#: Variables that keep trackers from sending anything, with the values of a user's that do so as well. What a script
#: itself says in its calls comes first, whatever these say.
_SILENT = {
    "WANDB_MODE": ("disabled", "offline", "dryrun"),
    # Of `Experiment`, of `comet_ml.start`, and of transformers' callback.
    "COMET_AUTO_LOG_DISABLE": ("1", "true"),
    "COMET_START_ONLINE": ("0", "false"),
    "COMET_MODE": ("DISABLED", "OFFLINE"),
    # Both of neptune's clients know it.
    "NEPTUNE_MODE": ("offline", "debug", "disabled"),
    "CLEARML_OFFLINE_MODE": ("1", "true"),
    "SWANLAB_MODE": ("disabled", "offline", "local"),
    # Since MLflow 3.13, files as its store have to be allowed.
    "MLFLOW_ALLOW_FILE_STORE": ("true",),
}
#: Variables for folders in which they keep what they do not send.
_THROWN_AWAY = (
    "COMET_OFFLINE_DIRECTORY", "NEPTUNE_DATA_DIRECTORY", "NEPTUNE_LOG_DIRECTORY", "CLEARML_CACHE_DIR", "TRACKIO_DIR",
)  # fmt: skip
#: The same for MLflow, as URIs.
_STORES = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
#: What names something in the user's own store, or where to send to.
_LEFT_OUT = (
    "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL",
)  # fmt: skip


def prepare(command: CommandRef, files: LaunchFiles) -> tuple[Path, Path | None]:
    """Make the folders that a launch has for itself.

    Returns:
        where it runs, and the folder that it is told to write to, if it is.
    """
    for folder, wanted in ((files.scratch, command.scratch), (files.output, command.output_flag is not None)):
        # An attempt before this one may have been killed.
        shutil.rmtree(folder, ignore_errors=True)
        if wanted:
            folder.mkdir()
    return (
        files.scratch if command.scratch else Path(command.folder),
        None if command.output_flag is None else files.output,
    )


def elsewhere(words: Sequence[str], folder: str) -> list[str]:
    """Return words that mean in any folder what they mean in this one: the files and folders that they name, also after
    ``--option=``, are named in full. A program without a slash is looked for in ``PATH``."""
    return [word if not i and os.sep not in word else _in_full(word, folder) for i, word in enumerate(words)]


def _in_full(word: str, folder: str) -> str:
    before, equals, name = word.partition("=") if word.startswith("-") else ("", "", word)
    path = os.path.join(folder, name)
    return f"{before}{equals}{path}" if name and os.path.exists(path) else word


def importing(env: Mapping[str, str], words: Sequence[str], folder: str) -> dict[str, str]:
    """Return an environment in which Python finds in any folder the modules that it finds in this one."""
    own = [folder] if any(option in words for option in _IMPORTS) else []
    outer = [os.path.join(folder, place) for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]
    return {**env, "PYTHONPATH": os.pathsep.join([*own, *outer])} if own or outer else dict(env)


def silent(env: Mapping[str, str], place: Path) -> dict[str, str]:
    """Return an environment in which experiment trackers send nothing.

    Args:
        place: a folder that is removed with the launch. What they write goes there.
    """
    found = {name: value for name, value in env.items() if name not in _LEFT_OUT}
    for name, values in _SILENT.items():
        if env.get(name, "").lower() not in map(str.lower, values):
            found[name] = values[0]
    found |= {name: str(place / "trackers" / name.split("_")[0].lower()) for name in _THROWN_AWAY}
    return found | {name: (place / "trackers" / "mlflow").as_uri() for name in _STORES}
