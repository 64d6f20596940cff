#!/usr/bin/env bash
# usage: scripts/cheatsheet.sh [FOLDER]
# Prints docs/cheatsheet as a PDF of one page into FOLDER (default: build/docs). Needs Chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/docs}
mkdir -p "$folder"
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
chromium --headless --no-sandbox --disable-gpu --user-data-dir="$profile" --no-pdf-header-footer \
  --print-to-pdf="$folder/cheatsheet.pdf" "file://$PWD/docs/cheatsheet/cheatsheet.html" 2>/dev/null
# Each page of a PDF is a separate object.
pages=$(grep -ac '/Type */Page\b' "$folder/cheatsheet.pdf")
if [[ $pages != 1 ]]; then
  echo "the cheat sheet has $pages pages, but must have one" >&2
  exit 1
fi
