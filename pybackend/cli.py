"""The command line: ``tfdist mnist``, ``doctor``, ``run``, ``tensorboard`` and others."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pybackend
from pybackend.core.errors import InputError, TfdistError
from pybackend.core.launchers import add_run_options, describe_batch, read_run_plan, run_script

# Options of mpirun, horovodrun and torchrun for the number of ranks.
_COUNTS = ("-n", "-np", "--np", "--nproc", "--nproc-per-node", "--nproc_per_node")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 1 for an error, 2 for invalid arguments."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # with the usage of the command, not of `tfdist`
        kind = "option" if unknown[0][0] == "-" else "argument"
        meant = ": the number of processes is --workers N" if unknown[0] in _COUNTS else ""
        options.fail(f"unknown {kind} {unknown[0]}{meant}")
    try:
        status: int = options.command(options)
        return status
    except TfdistError as error:
        print(f"tfdist: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tfdist: interrupted; all workers were stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfdist", description="Train Keras 3 models on many machines."
    )
    parser.add_argument("--version", action="version", version=f"tfdist {pybackend.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add_command(name: str, command: Callable[[Any], int], **settings: Any) -> Any:
        added = commands.add_parser(name, **settings)
        added.set_defaults(command=command, fail=added.error)
        return added

    for add in (_add_example, _add_clusters, _add_programs, _add_jobs):
        add(add_command)
    return parser


def _add_example(add_command: Callable[..., Any]) -> None:
    add = add_command(
        "mnist",
        _mnist,
        help="train a small network on MNIST on this machine",
        description="Train a small convolutional network on MNIST with several workers on this "
        "machine, and print its metrics.",
    ).add_argument
    add("--workers", type=int, default=3, help="number of workers (default: 3)")
    add("--epochs", type=int, default=3, help="passes over the data (default: 3)")
    add("--batch-size", type=int, default=64, help="rows per worker and step (default: 64)")
    add("--limit", type=int, help="maximum number of images")
    add("--seed", type=int, default=1, help="seed that makes the training repeatable (default: 1)")
    add("--data", metavar="FILE", help="path of an mnist.npz")
    add("--out", metavar="FILE", help="write the model to this file (*.h5)")


def _add_clusters(add_command: Callable[..., Any]) -> None:
    """Add the commands that check and configure clusters."""
    add = add_command(
        "doctor",
        _doctor,
        help="check the software and hardware of this machine or of a Spark cluster",
        description="Print versions, memory, cores and GPUs of this machine, and what to install. "
        "With --master, check each host of a Spark cluster, and whether the workers can connect "
        "to each other.",
    ).add_argument
    masters = "local[2], spark://host:7077, sc://host:15002 (Spark Connect), yarn, k8s://..."
    add("--master", type=_master, metavar="URL", help=f"check this Spark cluster: {masters}")
    add("--workers", type=_positive, metavar="N", help="number of slots to check (default: all)")
    setting = "setting of the Spark session; may be repeated"
    add("--conf", type=_setting, action="append", default=[], metavar="KEY=VALUE", help=setting)

    add = add_command(
        "tf-config",
        _tf_config,
        help="print a validated TF_CONFIG",
        description="Print the JSON for the environment variable TF_CONFIG of one process in a "
        "cluster. Invalid or contradictory addresses raise an error.",
    ).add_argument
    add("--workers", type=_split, metavar="HOST:PORT,...", help="addresses of the workers")
    add("--index", type=int, help="index of this process within its role")
    add("--role", default="worker", help="worker (default), chief, ps or evaluator")
    add("--chief", metavar="HOST:PORT", help="address of the chief")
    add("--ps", type=_split, metavar="HOST:PORT,...", help="addresses of the parameter servers")
    add("--evaluator", type=_split, metavar="HOST:PORT", help="address of the evaluator")

    pack = add_command(
        "pack",
        _pack,
        help="pack a Python environment for hosts that have nothing installed",
        description="Write a .tar.gz of this Python environment, with its interpreter, for "
        "Resources(environment=FILE) (in R: resources(environment = FILE)).",
    )
    packed = "file to write (default: environment.tar.gz)"
    pack.add_argument("file", nargs="?", default="environment.tar.gz", metavar="FILE", help=packed)
    other = "folder of another virtual environment (default: the environment of this tfdist)"
    pack.add_argument("--environment", default="this", metavar="FOLDER", help=other)

    secret = add_command(
        "secret",
        _secret,
        help="create the shared secret that processes use to authenticate each other",
        description="Write a random secret to a file that only you can read, and print its path. "
        "A secret that already exists is not changed.",
    )
    written = "file to write (default: the file that tfdist reads)"
    secret.add_argument("file", nargs="?", metavar="FILE", help=written)


def _add_programs(add_command: Callable[..., Any]) -> None:
    run = add_command(
        "run",
        _run,
        help="start a script once per rank, on this machine or on hosts over ssh",
        description="Start a Python or R script once per rank and print the output of all ranks. "
        "If one rank fails, the others are stopped.",
        usage="tfdist run [-w N] [--hosts a:2,b:2] [OPTION ...] [--] SCRIPT [ARGUMENT ...]",
        allow_abbrev=False,
    )
    add_run_options(run)

    tensorboard = add_command(
        "tensorboard",
        _tensorboard,
        help="run TensorBoard on this machine until Ctrl-C (in R: view_tensorboard())",
        description="Run TensorBoard on this machine for a folder of logs and print its URL. "
        "Ctrl-C stops it.",
    )
    shown = "log folder, as shown in a training result (default: logs)"
    tensorboard.add_argument("folder", nargs="?", metavar="FOLDER", help=shown)

    add = add_command(
        "bench-scale",
        _bench_scale,
        help="measure how a script's training scales, and predict it for more workers",
        description="Run a script that calls barrier_train() with different numbers of workers, "
        "and print step time, speed-up and efficiency.",
        usage="tfdist bench-scale [--workers 1,2,4] [OPTION ...] [--] SCRIPT [ARGUMENT ...]\n"
        "       tfdist bench-scale --gpus [--page FILE] [OPTION ...]",
        allow_abbrev=False,
    ).add_argument
    measured = "numbers of workers to measure (default: 1,2,4)"
    add("--workers", type=_counts, metavar="N,...", help=measured)
    gpus = "train three models instead of a script, on 1, 2, 4, ... of this machine's GPUs"
    add("--gpus", action="store_true", help=gpus)
    add("--page", metavar="FILE", help="with --gpus: write an HTML page to this file")
    modes = (
        "strong: the workers share one batch; weak: each worker has its own batch (default: both)"
    )
    add("--mode", type=_modes, default="both", metavar="MODE,...", help=modes)
    rows = (
        "rows per batch: global batch size (strong), rows per worker (weak) (default: the script's)"
    )
    add("--batch-size", type=_positive, metavar="ROWS", help=rows)
    add("--steps", type=_positive, metavar="N", help="steps per training (default: the script's)")
    repeats = "runs of each training (default: 1)"
    add("--repeats", type=_positive, default=1, metavar="K", help=repeats)
    add("--project", type=_positive, metavar="N", help="predict step times for up to N workers")
    add("--json", metavar="FILE", help="write all values to this file")
    add("--plot", metavar="FILE", help="write a plot to this file (.png, .pdf or .svg)")
    script = "a Python or R file (*.R) that calls barrier_train()"
    add("script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]", help=script)


def _add_jobs(add_command: Callable[..., Any]) -> None:
    add = add_command(
        "jobs",
        _jobs,
        help="list, watch, cancel or remove training runs started with submit_training()",
        description="Manage training runs that were started with submit_training(). "
        "An ID may be shortened to its end.",
    ).add_argument
    actions = ["list", "status", "logs", "result", "cancel", "remove"]
    meaning = (
        "list all jobs; print a job's status; print its logs; write its result to a file; end its "
        "workers; remove its folder"
    )
    add("action", choices=actions, metavar="|".join(actions), help=meaning)
    add("id", nargs="?", metavar="ID", help="the job (not for list)")
    followed = "logs: print new lines until the job ends; exit status 1 if it has no result"
    add("-f", "--follow", action="store_true", help=followed)
    written = "result: file to write, *.json (the whole result), *.h5 or *.keras (the model)"
    add("-o", "--output", metavar="FILE", help=written)
    chosen = "folder with the jobs (default: TFDIST_JOBS, or ~/.local/state/tfdist/jobs)"
    add("--folder", metavar="FOLDER", help=chosen)


def _mnist(options: argparse.Namespace) -> int:
    if options.out and Path(options.out).suffix != ".h5":  # checked before the training
        raise InputError(f"--out must be a *.h5 file, not {options.out!r}")
    names = ("workers", "epochs", "batch_size", "limit", "seed")
    result = pybackend.train_mnist(
        "local",
        path=options.data,
        **{name: getattr(options, name) for name in names},
    )
    print(result.summary())
    if options.out:
        print(f"model written to {result.save(options.out)}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from pybackend.doctor.machine import doctor

    if options.master is not None:
        return _probe(options)
    if options.workers or options.conf:
        options.fail("--workers and --conf need --master")
    facts = doctor()
    # The problem of rpy2 is one of the problems.
    for name, value in facts.items():
        if name not in ("problems", "verdict", "rpy2_problem"):
            print(f"{name:15} {_show(value)}")
    return _conclude(facts)


def _conclude(found: dict[str, Any]) -> int:
    for problem in found["problems"]:
        print(f"problem: {problem}")
    print(found["verdict"])
    return 1 if found["problems"] else 0


def _probe(options: argparse.Namespace) -> int:
    from pybackend.doctor.probe import probe
    from pybackend.doctor.spark_master import start_session

    with start_session(options.master, dict(options.conf)) as session:
        found = probe(session, options.workers)
    for host in found["hosts"]:
        print(host["name"], *host["lines"], sep="\n  ")
    return _conclude(found)


def _tf_config(options: argparse.Namespace) -> int:
    others = {name: getattr(options, name) for name in ("role", "chief", "ps", "evaluator")}
    print(pybackend.make_tf_config(options.workers or [], options.index, **others))
    return 0


def _pack(options: argparse.Namespace) -> int:
    print(pybackend.pack_environment(options.file, options.environment).summary())
    return 0


def _secret(options: argparse.Namespace) -> int:
    from pybackend.core.net.authentication import FILE_VARIABLE, default_path, make_secret

    path = Path(options.file) if options.file else default_path()
    is_new = make_secret(path)
    print(f"{path}: {'a new secret' if is_new else 'a secret already exists; left unchanged'}")
    print("Copy it to the same path on every machine, readable only by you (chmod 600)")
    if options.file:
        print(f"and set {FILE_VARIABLE} to its path there")
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.sbatch is not None:
        print(describe_batch(options))
        return 0
    return run_script(read_run_plan(options), options.dry_run)


def _tensorboard(options: argparse.Namespace) -> int:
    from pybackend.tracking.tensorboard import view_tensorboard

    with view_tensorboard(options.folder) as view:
        print(f"TensorBoard for {view.folder} at {view.url} (press Ctrl-C to stop it)", flush=True)
        try:
            view.wait()
        except KeyboardInterrupt:
            return 0
    return 1


def _jobs(options: argparse.Namespace) -> int:
    if (options.action == "list") != (options.id is None):
        options.fail("list takes no ID" if options.id else f"{options.action} needs an ID")
    if (options.action == "result") != (options.output is not None):
        options.fail("result needs -o FILE" if options.output is None else "-o is for result")
    if options.id is None:
        found = [f"{job.id}  {job.describe()}" for job in pybackend.jobs(options.folder)]
        print(*found or ["there are no jobs"], sep="\n")
        return 0
    job = pybackend.attach_job(options.id, folder=options.folder)
    if options.action == "logs":
        _print_logs(job, options.follow)
        print(job.describe())
        return int(options.follow and job.status != "finished")
    if options.action == "result":
        print(f"written to {job.result().save(options.output)}")
    elif options.action == "remove":
        job.remove()
    else:
        if options.action == "cancel":
            job.cancel()
        print(job.describe())
    return 0


def _print_logs(job: pybackend.types.DetachedJob, follows: bool) -> None:
    shown = 0
    while True:
        has_ended = job.status != "running"  # first: then the log is complete
        for line in job.logs(shown):
            print(line, flush=True)
            shown += 1
        if has_ended or not follows:
            return
        time.sleep(0.5)


def _bench_scale(options: argparse.Namespace) -> int:
    from pybackend.core.api.rendering import check_figure

    words = options.script[1:] if options.script[:1] == ["--"] else options.script
    if options.gpus and (words or options.plot or options.project):
        raise InputError("--gpus trains models of its own: leave out SCRIPT, --plot and --project")
    if not options.gpus and options.page:
        raise InputError("--page needs --gpus: for a script, use --plot")
    if not options.gpus and not words:
        raise InputError("specify a script, as in: tfdist bench-scale --workers 1,2,4 train.py")
    if options.plot:
        check_figure(options.plot)
    # Checked before the training runs.
    for path in filter(None, (options.json, options.plot, options.page)):
        if not Path(path).absolute().parent.is_dir():
            raise InputError(f"{path} cannot be written: its folder does not exist")
    if options.gpus:
        return _bench_gpus(options)
    workers = options.workers or [1, 2, 4]
    if options.project == 1:
        raise InputError("--project must be at least 2 workers")
    if options.project is not None and len(workers) < 2:
        raise InputError("--project needs at least two values in --workers, as in --workers 1,2,4")
    result = pybackend.bench_scale(
        words[0],
        workers,
        arguments=words[1:],
        **{name: getattr(options, name) for name in ("mode", "batch_size", "steps", "repeats")},
    )
    print(result)
    projection = None if options.project is None else result.project(options.project)
    if projection is not None:
        print(projection)
    if options.json:
        result.to_json(options.json, projection)
    if options.plot:
        result.plot(options.plot, projection)
    return 0


def _bench_gpus(options: argparse.Namespace) -> int:
    from pybackend.scaling.gpus import bench_gpus, write

    scaling = bench_gpus(options.workers, batch_size=options.batch_size, steps=options.steps or 50)
    print(scaling)
    write(scaling, options.page, options.json)
    return 0


def _counts(text: str) -> list[int]:
    return [_positive(word) for word in text.split(",")]


def _modes(text: str) -> str:
    words = set(text.split(","))
    if not words <= {"strong", "weak", "both"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not strong, weak or strong,weak")
    return "both" if len(words) > 1 else words.pop()


def _master(text: str) -> str:
    from pybackend.doctor.spark_master import check_master

    try:
        return check_master(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, not {text!r}")
    return name, value


def _split(text: str) -> list[str] | None:
    return text.split(",") if text else None


def _show(value: Any) -> str:
    if value is None:
        return "not found"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
