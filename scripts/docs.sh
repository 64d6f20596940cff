#!/usr/bin/env bash
# usage: scripts/docs.sh TARBALL FOLDER
# Builds the site into FOLDER and checks it. The vignettes are taken from the tarball, where R CMD
# build rendered them: each source must have its page there.
set -euo pipefail
tarball=$1 folder=$2
work=build/site
rm -rf "$folder" "$work"
mkdir -p "$work/vignettes"
tar -xzf "$tarball" -C "$work/vignettes" --strip-components=3 --wildcards 'tfdist/inst/doc/*.html'
for source in vignettes/*.Rmd; do
  page=$work/vignettes/$(basename "$source" .Rmd).html
  [[ -s $page ]] || { echo "$source was not rendered" >&2; exit 1; }
done
Rscript scripts/r-site.R "$work" >"$work/r-site.log" 2>&1 || { cat "$work/r-site.log" >&2; exit 1; }
grep 'Without a group' "$work/r-site.log" || true
python docs/site/assemble.py "$work"
python -m sphinx --quiet --fail-on-warning --keep-going -c docs/site -d "$work/doctrees" \
  "$work/source" "$folder"
rm "$folder/_static/webpack-macros.html" # a template of the theme, not a page
python scripts/check_site.py "$folder"
