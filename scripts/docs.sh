#!/usr/bin/env bash
# usage: scripts/docs.sh TARBALL FOLDER
# Takes the vignettes that R CMD build rendered out of the tarball. Each source must have its page.
set -euo pipefail
tarball=$1 folder=$2
rm -rf "$folder"
mkdir -p "$folder"
tar -xzf "$tarball" -C "$folder" --strip-components=3 --wildcards 'tfdist/inst/doc/*.html'
for source in vignettes/*.Rmd; do
  page=$folder/$(basename "$source" .Rmd).html
  [[ -s $page ]] || { echo "$source was not rendered" >&2; exit 1; }
  echo "$page"
done
