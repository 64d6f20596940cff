#!/usr/bin/env bash
# usage: scripts/py-install.sh ARGUMENT...
# Installs into .venv, at the versions of constraints.txt. uv takes a third of pip's time, but does
# not read pip's settings: if these name another index, or if uv fails, pip installs.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
# Relative paths, because they are split at spaces; variables, because these also apply to the
# environment that builds tfdist.
export PIP_CONSTRAINT=constraints.txt UV_CONSTRAINT=constraints.txt
pip=("$python" -m pip install --quiet --no-input --disable-pip-version-check --progress-bar off)
index=${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}
uv=.venv/bin/uv
if [[ -z $index ]] && { [[ -x $uv ]] || "${pip[@]}" --only-binary uv uv </dev/null; }; then
  # Its cache is off: it kept a new copy of PySpark, built from source (600 MB), for each clone.
  export UV_NATIVE_TLS=1 UV_NO_CACHE=1
  "$uv" pip install --quiet --python "$python" "$@" </dev/null && exit
fi
exec "${pip[@]}" --no-compile "$@" </dev/null
