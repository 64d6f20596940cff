#!/usr/bin/env bash
# usage: scripts/r-build.sh WHEEL FOLDER [R CMD build's options]
# Builds the R package, which contains the Python wheel of the same version, into FOLDER.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$1 folder=$2
shift 2

version=$(sed -n 's/^Version: *//p' rpkg/DESCRIPTION)
if [[ $(basename "$wheel") != "tfdist-$version-"* ]]; then
  echo "rpkg/DESCRIPTION has version $version, the wheel is $(basename "$wheel")" >&2
  exit 1
fi
rm -rf "$folder"
mkdir -p "$folder/source"
# A copy, so that the build does not write to the sources; links become files.
cp -RL rpkg "$folder/source/tfdist"
copy=$folder/source/tfdist
# The wheel replaces the sources from which it was built.
rm -rf "$copy/inst/python" "$copy"/tests/testthat/{_problems,testthat-problems.rds}
mkdir -p "$copy/inst/python"
cp "$wheel" "$copy/inst/python/"
(cd "$folder" && R CMD build "$@" source/tfdist </dev/null)
rm -rf "$folder/source"
