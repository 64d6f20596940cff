#!/usr/bin/env bash
# usage: scripts/release.sh FOLDER [FILE...]
# Builds the sdist and the wheel of the last commit twice, in folders of different names, with
# different times and permissions of files, and fails unless both builds are equal. Writes them to
# FOLDER, with an SBOM of constraints.txt, copies of the FILEs, and the checksums of all. Needs no
# network. If RELEASE is set, it must be the version's tag, such as v0.1.0.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' pybackend/__init__.py)
if [[ ${RELEASE:-v$version} != "v$version" ]]; then
  echo "the tag is $RELEASE, but pybackend/__init__.py has version $version" >&2
  exit 1
fi
rm -rf "$1"
mkdir -p "$1"
folder=$(realpath "$1") python=$(realpath -s .venv/bin/python)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

build() { # NAME
  mkdir -p "$work/$1"
  git archive HEAD | tar -x -C "$work/$1" --touch
  (cd "$work/$1" && "$python" -m build --no-isolation --outdir "$work/built-$1" . &>"$work/log") ||
    { cat "$work/log" >&2 && exit 1; }
}
(umask 022 && build one)
(umask 077 && build another-name)
if ! diff -r "$work/built-one" "$work/built-another-name"; then
  echo "two builds of the same commit differ: see above" >&2
  exit 1
fi
cp "$work"/built-one/* "${@:2}" "$folder"
PYTHONWARNINGS=ignore .venv/bin/cyclonedx-py requirements --output-reproducible --mc-type library \
  --pyproject "$work/one/pyproject.toml" -o "$folder/sbom.cdx.json" "$work/one/constraints.txt"
cd "$folder"
sha256sum -- * | tee "$work/sums"
cp "$work/sums" SHA256SUMS
