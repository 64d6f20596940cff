"""Pages of the Python package: a reference that Sphinx fills from docstrings, and the commands."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pybackend

# Each entry is a page: "title: names", or a name alone, which is then the title, too.
GROUPS = {
    "Train": [
        "barrier_train",
        "train_many: train_many types.Trials types.Trial",
        "Stop poor trials: MedianPruning SuccessiveHalving",
        "train_mnist",
        "types.TrainResult",
        "Detached jobs: submit_training attach_job jobs types.DetachedJob",
        "Reports of workers: types.WorkerReport types.StepTimes types.Audit types.Generation "
        "types.Restart types.Moment",
    ],
    "Use a model": [
        "barrier_evaluate",
        "barrier_predict",
        "predict_spark",
        "Models as files: load_model save_model",
        "Models as text: model_to_base64 model_from_base64",
    ],
    "Machines": [
        "hosts",
        "slurm",
        "kubernetes",
        "join",
        "TF_CONFIG: make_tf_config read_tf_config types.ClusterSpec",
    ],
    "Training options": [
        "DataOptions",
        "Exchange, LocalSteps: Exchange LocalSteps",
        "Elastic",
        "ModelOptions",
        "ParameterServer",
        "Recovery: Recovery load_checkpoint",
        "Resources",
        "pack_environment: pack_environment types.PackedEnvironment",
        "ScaleLearningRate",
    ],
    "Data": [
        "TFRecord files: write_tfrecords types.WrittenRecords read_tfrecords",
        "mnist",
        "replay_batches",
    ],
    "Your own function on every worker": [
        "barrier_run: barrier_run types.WorkerContext",
        "RFunction",
    ],
    "Databases": [
        "Models in databases: deploy_model types.Deployment undeploy_model",
        "to_sql: to_sql types.SqlModel",
    ],
    "Watch training": [
        "Observer",
        "track_mlflow, track_wandb: track_mlflow track_wandb",
        "report",
        "TensorBoard: track_tensorboard view_tensorboard types.TensorBoardView",
    ],
    "Plan": [
        "plan: plan types.Plan types.PlannedWorker",
        "bench_scale: bench_scale types.ScalingResult types.ScalingRow",
    ],
    "Errors": [
        "Errors: TfdistError InputError ClusterError WorkerFailedError types.Failure PeerLostError "
        "SerializationError DatabaseError RError UnverifiedFileWarning"
    ],
    "From other packages": [
        "TFDistributor",
        "Stages of Spark ML: ml.KerasEstimator ml.KerasModel",
        "MirroredStrategyRunner: spark_tensorflow_distributor.MirroredStrategyRunner",
        "tfos.TFCluster",
        "tfos.TFNode",
        "tfos.TFParallel",
        "tfos.pipeline",
        "tfos.dfutil",
    ],
}


def _find(name: str) -> Any:
    module, _, last = f"pybackend.{name}".rpartition(".")
    try:
        return getattr(importlib.import_module(module), last)
    except AttributeError:
        return importlib.import_module(f"{module}.{last}")


def _directive(name: str) -> str:
    thing = _find(name)
    if inspect.ismodule(thing):
        # Params of one stage each, with a getter and a setter: they would fill every search.
        mixins = ", ".join(part for part in vars(thing) if part.startswith("Has"))
        hidden = f"   :exclude-members: {mixins}\n" if mixins else ""
        return f".. automodule:: pybackend.{name}\n   :members:\n   :undoc-members:\n{hidden}"
    whole = f"pybackend.{name}" if "." in name else name
    if not inspect.isclass(thing):
        return f".. autofunction:: {whole}\n"
    if issubclass(thing, BaseException):
        return f".. autoexception:: {whole}\n   :members:\n   :show-inheritance:\n"
    return f".. autoclass:: {whole}\n   :members:\n"


def _page(title: str, names: list[str]) -> str:
    heading = (f"pybackend.{title}" if title == names[0] else title).replace("_", "\\_")
    parts = [heading, "=" * len(heading), "", ".. py:currentmodule:: pybackend", ""]
    return "\n".join([*parts, *map(_directive, names)])


def _first_sentence(name: str) -> str:
    text = inspect.getdoc(_find(name)) or ""
    return text.split("\n\n")[0].replace("\n", " ")


def grouped_pages() -> dict[str, dict[str, list[str]]]:
    """By group and title the names of each page; those without a group are in one of their own."""
    groups: dict[str, dict[str, list[str]]] = {}
    for group, entries in GROUPS.items():
        split = [entry.rpartition(": ") for entry in entries]
        groups[group] = {title or names: names.split() for title, _, names in split}
    listed = {name for pages in groups.values() for names in pages.values() for name in names}
    more = [name for name in pybackend.__all__ if name not in listed and name != "__version__"]
    if more:
        print(f"Without a group in docs/site/python_pages.py: {', '.join(more)}", file=sys.stderr)
        groups["More"] = {name: [name] for name in more}
    return groups


def _index(groups: dict[str, dict[str, list[str]]]) -> str:
    title = "Python reference"
    parts = [title, "=" * len(title), "", ".. py:module:: pybackend", ""]
    parts += [
        "``import pybackend`` takes a moment: each name loads what it needs when it is used.",
        "",
    ]
    parts += [".. py:data:: __version__", "", "   The release, e.g. ``0.1.0``.", ""]
    entries = []
    for group, pages in groups.items():
        parts += [group, "-" * len(group), "", ".. list-table::", "   :widths: 35 65", ""]
        for page_title, names in pages.items():
            entries.append(f"   {page_title} <{names[0]}>")
            for name in names:
                role = "mod" if inspect.ismodule(_find(name)) else "obj"
                parts.append(f"   * - :py:{role}:`{name} <pybackend.{name}>`")
                parts.append(f"     - {_first_sentence(name)}")
        parts.append("")
    return "\n".join([*parts, ".. toctree::", "   :hidden:", "", *entries, ""])


def _ask(*arguments: str) -> str:
    command = [sys.executable, "-m", "pybackend", *arguments, "--help"]
    settings = {**os.environ, "COLUMNS": "90", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=settings).stdout


def _commands() -> str:
    shown = _ask()
    parts = ["# Command line", "", f"```text\n{shown}```", ""]
    for name in re.findall(r"^    (\S+)", shown, re.M):
        parts += [f"## tfdist {name}", "", f"```text\n{_ask(name)}```", ""]
    return "\n".join(parts)


def write_pages(source: Path) -> None:
    """All pages of the Python package below `source`."""
    (source / "reference").mkdir(parents=True)
    groups = grouped_pages()
    for pages in groups.values():
        for title, names in pages.items():
            (source / "reference" / f"{names[0]}.rst").write_text(_page(title, names))
    (source / "reference/index.rst").write_text(_index(groups))
    (source / "command-line.md").write_text(_commands())
    start = (Path(__file__).parent / "python.md").read_text()
    (source / "index.md").write_text(start)
