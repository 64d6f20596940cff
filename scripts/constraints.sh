#!/usr/bin/env bash
# usage: scripts/constraints.sh [--upgrade] [NAME...]
# Writes constraints.txt: one version of each package for every supported Python, from the first
# patch release on. NAMEs are packages that are installed without their dependencies.
set -euo pipefail
cd "$(dirname "$0")/.."
upgrade=()
if [[ ${1:-} == --upgrade ]]; then upgrade=(--upgrade) && shift; fi
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
export UV_NATIVE_TLS=1

# Present versions are kept where they still fit.
compile() { # FILE ARGUMENT...
  cp constraints.txt "$made/$1"
  .venv/bin/uv pip compile --quiet --universal --python-version 3.11.0 --no-header --no-annotate \
    "${upgrade[@]}" --output-file "$made/$1" "${@:2}" >/dev/null
}
compile together --all-extras pyproject.toml
# Some of these exclude each other's dependencies.
printf '%s\n' "$@" >"$made/names"
compile alone --no-deps "$made/names"
{
  echo "# Written by \`make constraints\`."
  { grep -vf <(sed 's/^\([^ =]*==\).*/^\1/' "$made/together") "$made/alone" || true; } |
    LC_ALL=C sort - "$made/together"
} >"$made/constraints.txt"
mv "$made/constraints.txt" constraints.txt
