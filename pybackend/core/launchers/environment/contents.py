"""The files of a Python environment: its packages, its interpreter and the standard library.

They are laid out like an installed Python, which finds its library next to itself. So the packed
environment works in any folder, without a file that contains the folder's path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.words import show

# Libraries of the interpreter that hosts may lack.
LIBRARIES = "lib/system"
_SECONDS = 60.0
# Run by the environment's Python, of any release.
_DESCRIBE = """
import json, os, platform, site, sys, sysconfig
from importlib.metadata import distributions
sites = [path for path in site.getsitepackages() if os.path.isdir(path)]
found, editable = {}, []
for one in distributions(path=sites):
    found[one.metadata["Name"]] = one.version
    origin = json.loads(one.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        editable.append(one.metadata["Name"])
names = os.confstr_names
print(json.dumps({
    "prefix": sys.prefix,
    "executable": os.path.realpath(sys.executable),
    "version": platform.python_version(),
    "cache_tag": sys.implementation.cache_tag,
    "library": os.path.dirname(os.__file__),
    "library_name": "%s/python%d.%d" % ((sys.platlibdir,) + sys.version_info[:2]),
    "extensions": [path for path in sys.path if os.path.basename(path) == "lib-dynload"],
    "sites": sites,
    "packages": found,
    "editable": sorted(editable),
    "machine": platform.machine(),
    "system": sys.platform,
    "libc": os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in names else "another",
}))
"""
# Run by the interpreter itself, outside of its virtual environment: where it looks for packages.
_FIND_SITE = "import site; print(site.getsitepackages(['/'])[0].lstrip('/'))"
# Parts of the standard library and of packages that no worker uses.
_UNUSED_LIBRARY = ("test", "idlelib", "turtledemo", "ensurepip", "site-packages", "dist-packages")
_UNUSED = ("tensorflow/include", "pyspark/jars", "pyspark/examples", "pyspark/tests")
# Where a master and workers that are started from PySpark write: it grows with each application, so
# that each call packed and sent the environment again
# (test_files_of_a_cluster_started_from_its_pyspark_are_left_out).
_OF_CLUSTER = ("pyspark/work", "pyspark/logs")
# The machine's own C library must fit its kernel and its other libraries.
_OF_SYSTEM = re.compile(r"(ld-linux|linux-vdso|lib(c|m|dl|rt|util|pthread|resolv|nsl|anl)\.so)")
# Extension modules with large libraries for displays.
_OF_DISPLAYS = ("_tkinter", "_curses", "readline")
# Files that say where an environment was, or how it was installed.
OF_ORIGIN = ("RECORD", "direct_url.json", "INSTALLER", "REQUESTED")
_LEFT_OUT = re.compile(r"(__editable__|_editable_impl_).*|.*\.(egg-link|pyc|a)|EXTERNALLY-MANAGED")


@dataclass(frozen=True)
class Entry:
    """One entry of the packed environment: a file, a link, or content that is made here."""

    name: str  # relative path in the packed environment
    source: str | None = None  # file on this machine; None: `content` or `link`
    content: bytes = b""
    link: str | None = None
    is_executable: bool = False
    is_code: bool = False  # compiled code: Python can make it from another entry


@dataclass(frozen=True)
class EnvironmentFacts:
    """Facts that an environment's Python reports about itself."""

    prefix: str
    executable: str
    version: str
    cache_tag: str
    library: str
    library_name: str
    extensions: tuple[str, ...]
    sites: tuple[str, ...]
    packages: Mapping[str, str]
    editable: tuple[str, ...]
    machine: str
    system: str
    libc: str
    site: str

    @property
    def minor(self) -> str:
        """Release of Python, such as ``3.11``."""
        return ".".join(self.version.split(".")[:2])


def describe_environment(python: str) -> EnvironmentFacts:
    """Ask an environment's Python about its packages and folders.

    Raises `InputError` if it does not start, or belongs to an environment that cannot be packed
    here.
    """
    try:
        facts = json.loads(_run(python, _DESCRIBE))
    except ValueError as error:
        raise InputError(f"`environment`: {python} is not a Python") from error
    facts["site"] = _run(facts["executable"], _FIND_SITE).strip()
    lists = {name: tuple(value) for name, value in facts.items() if isinstance(value, list)}
    found = EnvironmentFacts(**{**facts, **lists})
    if found.system != "linux":
        raise InputError(f"{python} is not on Linux, and only Linux environments can be packed")
    if Path(found.prefix, "conda-meta").is_dir():
        advice = "pack it with `conda-pack -o env.tar.gz`, and pass that file as `environment`"
        raise InputError(f"{found.prefix} is a conda environment: {advice}")
    return found


def _run(python: str, program: str) -> str:
    how: Any = {"timeout": _SECONDS, "cwd": "/", "capture_output": True, "text": True}
    try:
        ran = subprocess.run([python, "-I", "-c", program], check=True, **how)
    except (OSError, subprocess.SubprocessError) as error:
        printed = str(getattr(error, "stderr", "") or error).strip().splitlines()
        reason = f"its Python, {python}, does not run: {printed[-1]}"
        raise InputError(f"`environment`: {reason}") from error
    return str(ran.stdout)


def list_entries(facts: EnvironmentFacts) -> list[Entry]:
    """Return the entries of a packed environment, sorted by name.

    Its Python is the last: an environment that is cut off between two files has none.
    """
    entries: dict[str, Entry] = {}
    for found in (
        _list_interpreter(facts),
        _walk(facts.library, facts.library_name, facts.cache_tag, _UNUSED_LIBRARY),
        *(_walk(path, f"{facts.library_name}/lib-dynload", "", ()) for path in facts.extensions),
        *(_walk(path, facts.site, facts.cache_tag, _UNUSED + _OF_CLUSTER) for path in facts.sites),
        _list_scripts(facts),
    ):
        for entry in found:
            entries.setdefault(entry.name, entry)
    # When it came first, an archive that was cut off between two files counted as whole
    # (test_an_archive_that_ends_between_two_files_leaves_nothing).
    listed = sorted(entries, key=lambda name: (name == "bin/python", name))
    return [entries[name] for name in listed]


def _list_interpreter(facts: EnvironmentFacts) -> Iterator[Entry]:
    """Yield the interpreter, and the libraries that it and its extension modules need."""
    name = f"python{facts.minor}"
    yield Entry(f"bin/{name}", facts.executable, is_executable=True)
    for link in ("python", "python3"):
        yield Entry(f"bin/{link}", link=name)
    modules = [path for folder in facts.extensions for path in Path(folder).glob("*.so")]
    used = [str(path) for path in modules if not path.name.startswith(_OF_DISPLAYS)]
    for library, path in sorted(_find_libraries([facts.executable, *used]).items()):
        yield Entry(f"{LIBRARIES}/{library}", path, is_executable=True)


def _find_libraries(files: Iterable[str]) -> dict[str, str]:
    """As far as `ldd` finds them, by name."""
    program = shutil.which("ldd")
    if program is None:
        return {}
    shown = subprocess.run([program, *files], capture_output=True, text=True, check=False).stdout
    found = dict(re.findall(r"^\s+(\S+) => (/\S+)", shown, re.MULTILINE))
    return {name: path for name, path in found.items() if not _OF_SYSTEM.match(name)}


def _list_scripts(facts: EnvironmentFacts) -> Iterator[Entry]:
    """Yield the environment's Python scripts; they start the Python in their own folder."""
    folder = Path(facts.prefix, "bin")
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.is_file() or path.is_symlink():
            continue
        with path.open("rb") as file:
            first = file.readline(1024)
            is_ours = first.startswith(b"#!") and b"python" in first
            rest = file.read() if is_ours else b""
        if rest:
            start = b"""#!/bin/sh\n'''exec' "$(dirname -- "$0")/python" "$0" "$@"\n' '''\n"""
            yield Entry(f"bin/{path.name}", content=start + rest, is_executable=True)


def _walk(root: str, name: str, tag: str, unused: tuple[str, ...]) -> Iterator[Entry]:
    """Yield the files below a folder under their names in the packed environment."""
    pending = [""]
    while pending:
        inside = pending.pop()
        with os.scandir(os.path.join(root, inside)) as listed:
            found = sorted(listed, key=lambda entry: entry.name)
        for entry in found:
            path = os.path.join(inside, entry.name)
            if entry.is_symlink() and (link := _find_link(root, path)):
                yield Entry(f"{name}/{path}", link=link)
            elif entry.is_dir() and not _is_above(entry):
                # The folder config-...: libraries to link programs with.
                is_used = path not in unused and not path.startswith("config-")
                if is_used and entry.name != "__pycache__":
                    pending.append(path)
            elif entry.is_file() and not _LEFT_OUT.fullmatch(entry.name):
                yield from _list_file(entry, f"{name}/{path}", tag)


def _find_link(root: str, path: str) -> str | None:
    """Return the target of a link that stays below a folder; None: its content is packed."""
    target = os.readlink(os.path.join(root, path))
    reached = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return None if os.path.isabs(target) or reached.startswith("..") else target


def _is_above(entry: os.DirEntry[str]) -> bool:
    """True for a link to a folder that contains it."""
    # Packing followed it without end
    # (test_links_to_folders_above_are_left_out_and_unreadable_files_are_named).
    own = Path(os.path.realpath(os.path.dirname(entry.path)), entry.name)
    return entry.is_symlink() and Path(os.path.realpath(entry.path)) in own.parents


def _list_file(entry: os.DirEntry[str], name: str, tag: str) -> Iterator[Entry]:
    status = entry.stat()
    yield Entry(name, entry.path, is_executable=bool(status.st_mode & 0o100))
    if not tag or not name.endswith(".py"):
        return
    stem = f"__pycache__/{entry.name[:-3]}.{tag}.pyc"
    code = os.path.join(os.path.dirname(entry.path), stem)
    if _is_current(code, status):
        yield Entry(f"{os.path.dirname(name)}/{stem}", code, is_code=True)


def _is_current(code: str, source: os.stat_result) -> bool:
    """True if compiled code belongs to a source file, as Python decides it."""
    wanted = struct.pack("<III", 0, int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
    with suppress(OSError), open(code, "rb") as file:
        return file.read(16)[4:] == wanted
    return False


def read_code(path: str) -> bytes:
    """Return compiled code in the form that Python does not compare with its source.

    The times of the files change when they are unpacked.
    """
    content = Path(path).read_bytes()
    return content[:4] + (1).to_bytes(4, "little") + bytes(8) + content[16:]


def find_python(environment: str) -> str:
    """Return the Python of an environment: ``"this"`` or its folder."""
    if environment == "this":
        return sys.executable
    python = Path(environment, "bin", "python")
    if os.access(python, os.X_OK):
        return os.path.abspath(python)  # it is started in another folder
    raise InputError(f"`environment` is the folder {show(environment)}, which has no bin/python")
