#!/usr/bin/env bash
# usage: scripts/py-setup.sh EXTRA...
# Installs tfdist (editable) with these extras into .venv, at the versions of constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

# An interrupted first run leaves a .venv without pip.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  scripts/apt-install.sh python
  PYTHON=$(scripts/find-python.sh)
  "$PYTHON" -m venv --clear .venv
fi

extras=$(IFS=,; echo "$*")
echo "Python packages into .venv: tfdist[$extras]"
# rpy2's other mode compiles against R, which may not be installed yet.
export RPY2_CFFI_MODE=${RPY2_CFFI_MODE:-ABI}
scripts/py-install.sh --editable ".[$extras]"
