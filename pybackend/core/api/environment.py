"""Pack a Python environment for workers on other hosts."""

from __future__ import annotations

import os
from pathlib import Path

from pybackend.core.api.calls import explain_arguments
from pybackend.core.data.files import check_writable
from pybackend.core.errors import InputError
from pybackend.core.job.worker_options import THIS
from pybackend.core.launchers import PackedEnvironment, pack_environment_of
from pybackend.core.words import show


@explain_arguments
def pack_environment(
    path: str | os.PathLike[str] = "environment.tar.gz", environment: str | os.PathLike[str] = THIS
) -> PackedEnvironment:
    """Pack a Python environment into a file: its packages, interpreter and standard library.

    Pass the file to `Resources`. Without it, ``Resources(environment="this")`` packs the
    environment in each session again. The file works in any folder where it is unpacked, such as
    ``spark.archives`` or an image, with ``bin/python`` as its Python. Equal environments give files
    with equal digests.

    Parameters
    ----------
    path
        File to write, which ends with ``.tar.gz``.
    environment
        ``"this"`` (default): the environment of this session. Or the folder of a virtual
        environment on this machine. For conda environments use conda-pack, whose files `Resources`
        accepts.

    Returns
    -------
    PackedEnvironment
        Path, size in bytes, digest and contents of the file. Printing it shows a summary.

    Raises
    ------
    InputError
        The environment cannot be packed, or the file cannot be written.
    ClusterError
        The disk is full.

    Notes
    -----
    Left out are files that no worker needs: PySpark's jars, TensorFlow's C++ headers, tests of the
    standard library, and packages that are folders of sources (``pip install -e``). tfdist itself
    is always sent with the job.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path).endswith(".tar.gz"):
        raise InputError(f"`path` must end with .tar.gz, not {show(path)}")
    target = Path(os.path.expanduser(path))
    if not target.absolute().parent.is_dir():
        raise InputError(f"`path` is {show(os.fspath(path))}, whose folder does not exist")
    if target.is_dir():
        raise InputError(f"`path` is {show(os.fspath(path))}, which is a folder")
    check_writable(str(target), "path")
    if isinstance(environment, (str, os.PathLike)):
        given = os.path.expanduser(os.fspath(environment))
        if given == THIS or os.path.isdir(given):
            return pack_environment_of(given, target)
    raise InputError(
        f"`environment` must be {show(THIS)} or the folder of an environment, not "
        f"{show(environment)}"
    )
