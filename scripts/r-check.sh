#!/usr/bin/env bash
# usage: scripts/r-check.sh TARBALL FOLDER
# Runs R CMD check, which must end without errors, warnings and notes. The tests and the vignettes
# run separately (make r-test, make docs), so that nothing runs twice.
set -euo pipefail
tarball=$1 folder=$2
rm -rf "$folder"
mkdir -p "$folder"

# Checks of --as-cran that need the network, CRAN's incoming queue, LaTeX or HTML Tidy.
for check in CRAN_INCOMING CRAN_INCOMING_REMOTE SYSTEM_CLOCK XREFS_USE_ALIASES_FROM_CRAN \
  RD_VALIDATE_RD2HTML FORCE_SUGGESTS; do
  export "_R_CHECK_${check}_=false"
done
# Packages for dates ask systemd for the time zone, which a container lacks.
export TZ=${TZ:-UTC}
# The size check of PDFs requires qpdf, although there is no PDF to check.
export R_QPDF=${R_QPDF:-true}

R CMD check --as-cran --no-manual --no-tests --no-vignettes --no-build-vignettes \
  --output="$folder" "$tarball" </dev/null
if ! grep -qx 'Status: OK' "$folder"/*.Rcheck/00check.log; then
  echo "R CMD check must end with 'Status: OK'; see $folder" >&2
  exit 1
fi
