"""What a run has left in each experiment tracker, read with the tracker's own reader: ``(parameters, figures)``, where
figures are lists of ``(step, value)`` by name, and parameters text."""

import json
from pathlib import Path


def tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    read = EventAccumulator(str(folder / "kept" / "tensorboard"))
    read.Reload()
    figures = {name: [(one.step, one.value) for one in read.Scalars(name)] for name in read.Tags()["scalars"]}
    begun = HParamsPluginData.FromString(read.PluginTagToContent("hparams")["_hparams_/session_start_info"])
    told = begun.session_start_info.hparams
    return {name: str(getattr(told[name], told[name].WhichOneof("kind"))) for name in told}, figures


def mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("whole").experiment_id])
    names = run.data.metrics
    figures = {n: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, n)] for n in names}
    return run.data.params, figures


def wandb(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    parameters, figures = {}, {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in logged(path.read_bytes()):
            record = Record.FromString(data)
            for one in record.run.config.update:
                parameters[one.key] = str(json.loads(one.value_json))
            step = record.history.step.num
            for one in record.history.item:
                name = one.key or "/".join(one.nested_key)
                figures.setdefault(name, []).append((step, json.loads(one.value_json)))
    return parameters, figures


def logged(data):
    """Yield the records of one of wandb's files, for which it has no reader in Python: LevelDB's log format, from the
    eighth byte on (https://github.com/google/leveldb/blob/main/doc/log_format.md)."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def trackio(folder):
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("whole")
    figures = {}
    for row in SQLiteStorage.get_logs("whole", name):
        for key, value in row.items():
            figures.setdefault(key, []).append((row["step"], value))
    config = SQLiteStorage.get_run_config("whole", name)
    return {key: str(value) for key, value in config.items()}, figures


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that make all trackers write below a folder."""
    return {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "WANDB_DIR": str(folder),
        "TRACKIO_DIR": str(folder / "trackio"),
    }
