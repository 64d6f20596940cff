#!/usr/bin/env bash
# usage: scripts/r-documented.sh
# Fails if rpkg/man or rpkg/NAMESPACE differs from what roxygen2 generates from the sources.
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -RL rpkg "$copy/tfdist"
(cd "$copy/tfdist" && Rscript -e 'roxygen2::roxygenise()' >"$copy/log" 2>&1) || {
  cat "$copy/log" >&2
  exit 1
}
if ! diff -ru rpkg/man "$copy/tfdist/man" || ! diff -u rpkg/NAMESPACE "$copy/tfdist/NAMESPACE"; then
  echo "Run 'make r-document' and commit the result." >&2
  exit 1
fi
