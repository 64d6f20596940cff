"""Write rpkg/R/call-options.R: the arguments of R's calls, and their help, from those in Python.

`make r-document` runs it; a test checks that the file is current.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import pybackend  # noqa: E402
from pybackend.core.job.call_options import CALLS, list_options, read_texts  # noqa: E402
from pybackend.core.words import show, speak, spoken  # noqa: E402

PAGE = ROOT / "rpkg" / "R" / "call-options.R"
_HEAD = """\
# fmt: skip file
# Written by scripts/r_options.py from the arguments in Python; run `make r-document`.
"""
# R's functions that return a value for an argument, and Python's classes and functions.
_MAKERS = {
    "data_options": "DataOptions",
    "elastic": "Elastic",
    "exchange": "Exchange",
    "hosts": "hosts",
    "kubernetes": "kubernetes",
    "local_steps": "LocalSteps",
    "model_options": "ModelOptions",
    "parameter_server": "ParameterServer",
    "recovery": "Recovery",
    "resources": "Resources",
    "slurm": "slurm",
    "track_mlflow": "track_mlflow",
    "track_tensorboard": "track_tensorboard",
    "track_wandb": "track_wandb",
}
# The pages that describe the arguments of a maker, unless R's own text does.
_PAGES = {
    "data_options": "data_options",
    "elastic": "elastic",
    "exchange": "exchange",
    "local_steps": "exchange",
    "model_options": "model_options",
    "parameter_server": "parameter_server",
    "recovery": "recovery",
    "resources": "resources",
}
# Arguments that mean more in R, or have other values, and that its own pages describe.
_OWN = {
    *("batch_size", "callbacks", "class_weight", "features", "label", "seed", "verbose"),
    *("custom_objects", "on_missing", "scale_lr", "tensors", "tfrecord_spec", "type"),
    *("categories", "encode", "repartition"),
}
# R's predictions take the levels from the fit.
_NOT_IN_R = {"barrier_predict": {"levels"}}
_SESSION_DEFAULTS = {
    "workers": 'getOption("tfdist.workers")',
    "verbose": 'getOption("tfdist.verbose", 1)',
}
# What R calls the functions and classes in a text; others have the same name and are functions.
_NAMES = {
    **{python: f"[{r}()]" for r, python in _MAKERS.items()},
    "TrainResult": "[tfdist_fit]",
    "Observer": "[observer()]",
}


def write_page() -> str:
    """Return the whole file."""
    language = spoken()
    speak("R")
    try:
        return _write()
    finally:
        speak(language)


def _write() -> str:
    texts = {
        one.name: one.text
        for call in ("barrier_evaluate", "barrier_train")
        for one in list_options(CALLS[call]).values()
    }
    known = {one.name: one for call in CALLS.values() for one in list_options(call).values()}
    defaults = {name: _default(name, one.option.default) for name, one in sorted(known.items())}
    calls = {
        call: [name for name in list_options(group) if name not in _NOT_IN_R.get(call, ())]
        for call, group in CALLS.items()
        if call == "barrier_train" or group is not CALLS["barrier_train"]
    }
    parts = [
        _HEAD,
        "#' Options of calls that train or use a model",
        "#'",
        "#' They mean the same in all calls that have them.",
        "#'",
        *_describe(texts),
        "#' @name call_options",
        "#' @keywords internal",
        "NULL\n",
        *(line for name, page in _PAGES.items() for line in _page_of(name, page)),
        "# Options and their defaults.",
        *_call("option_defaults <- alist", _settings(defaults)),
        "",
        "# The options of each call.",
        *(line for call, names in calls.items() for line in _options_of(call, names)),
        "",
        "# The names in Python of the functions that return a value for an argument.",
        *_call("python_makers <- c", _settings({r: show(name) for r, name in _MAKERS.items()})),
        "",
        "# Their arguments.",
        "maker_arguments <- list()",
        *(line for name in _MAKERS for line in _arguments(name)),
    ]
    return "\n".join(parts) + "\n"


def _default(name: str, value: Any) -> str:
    return _SESSION_DEFAULTS.get(name) or ("NULL" if value == () else show(value))


def _page_of(name: str, page: str) -> list[str]:
    known = read_texts(getattr(pybackend, _MAKERS[name]).__doc__)
    known = {one: text for one, text in known.items() if not text.startswith("As in ")}
    return [f"#' @rdname {page}", f"#' @name {name}", *_describe(known), "NULL\n"]


def _describe(texts: Mapping[str, str]) -> list[str]:
    """Return roxygen's lines for arguments; those with one text are described together."""
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        if name not in _OWN:
            names.setdefault(_in_r(text), []).append(name)
    return [
        f"#' {line}"
        for text, of in names.items()
        for line in _fill(f"@param {','.join(of)} {text}", "  ")
    ]


def _fill(text: str, later: str = "") -> list[str]:
    return textwrap.wrap(
        text, 97, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def _in_r(text: str) -> str:
    """Return a text of numpydoc as roxygen's Markdown, with R's names and values."""
    text = re.sub(r"\s+", " ", text)
    parts = re.split(r"(``.+?``|`\w+`)", text)
    for place, part in enumerate(parts):
        if part.startswith("``"):
            parts[place] = f"`{_code(part.strip('`'))}`"
        elif part.startswith("`"):
            name = part.strip("`")
            parts[place] = _NAMES.get(name, f"[{name}()]")
        else:
            parts[place] = re.sub(
                r"\b(None|True|False)\b", lambda m: f"`{show(_VALUES[m[1]])}`", part
            )
    return "".join(parts)


_VALUES = {"None": None, "True": True, "False": False}


def _code(code: str) -> str:
    """Return code of Python as R's users write it; code that is not Python's is unchanged."""
    try:
        tree = ast.parse(code).body
    except SyntaxError:
        return code
    if len(tree) != 1:
        return code
    if isinstance(tree[0], ast.Assign) and isinstance(tree[0].targets[0], ast.Name):
        return f"{tree[0].targets[0].id} = {_expression(tree[0].value)}"
    return _expression(tree[0].value) if isinstance(tree[0], ast.Expr) else code


def _expression(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return show(node.value)
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        values = [f'"{_expression(key)}" = {_expression(value)}' for key, value in pairs if key]
        return f"c({', '.join(values)})"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "float":
            return show(float(ast.literal_eval(node.args[0])))
        name = _NAMES.get(node.func.id, node.func.id).strip("[]()")
        given = [*map(_expression, node.args)]
        given += [f"{one.arg} = {_expression(one.value)}" for one in node.keywords]
        return f"{name}({', '.join(given)})"
    return ast.unparse(node)


def _arguments(maker: str) -> list[str]:
    """Return the arguments of a maker; those that Python takes by name only follow `...`."""
    values: dict[str, str] = {}
    for one in inspect.signature(getattr(pybackend, _MAKERS[maker])).parameters.values():
        if one.kind is one.KEYWORD_ONLY and values:
            values.setdefault("...", "")
        values[one.name] = "" if one.default is one.empty else _default("", one.default)
    return _call(f"maker_arguments${maker} <- alist", _settings(values))


def _options_of(call: str, names: list[str]) -> list[str]:
    return _call(f"{call}_options <- c", [show(name) for name in names])


def _settings(values: Mapping[str, str]) -> list[str]:
    return [f"{name} = {value}" for name, value in values.items()]


def _call(function: str, arguments: Iterable[str]) -> list[str]:
    """Return the lines of a call."""
    lines = [""]
    for one in arguments:
        if lines[-1] and len(lines[-1]) + len(one) > 96:
            lines.append("")
        lines[-1] += f"{one}, "
    lines = [line.rstrip() for line in [*lines[:-1], lines[-1].removesuffix(", ")]]
    whole = f"{function}({' '.join(lines)})"
    return [whole] if len(whole) <= 100 else [f"{function}(", *(f"  {one}" for one in lines), ")"]


if __name__ == "__main__":
    PAGE.write_text(write_page())
