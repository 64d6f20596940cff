#!/usr/bin/env bash
# usage: scripts/r-check.sh TARBALL FOLDER
# R CMD check, which must end with no error, warning or note. The tests and the vignettes run
# on their own (make r-test, make docs), so that nothing runs twice.
set -euo pipefail
tarball=$1 folder=$2
rm -rf "$folder"
mkdir -p "$folder"

# What --as-cran would ask of the network, of CRAN's incoming queue, of LaTeX and HTML Tidy.
for check in CRAN_INCOMING CRAN_INCOMING_REMOTE SYSTEM_CLOCK XREFS_USE_ALIASES_FROM_CRAN \
  RD_VALIDATE_RD2HTML FORCE_SUGGESTS; do
  export "_R_CHECK_${check}_=false"
done
# Packages that deal with time ask systemd for the zone, which is not there in a container.
export TZ=${TZ:-UTC}
# Its size check of PDFs wants qpdf to be there, and there is no PDF to run it on.
export R_QPDF=${R_QPDF:-true}

R CMD check --as-cran --no-manual --no-tests --no-vignettes --no-build-vignettes \
  --output="$folder" "$tarball" </dev/null
if ! grep -qx 'Status: OK' "$folder"/*.Rcheck/00check.log; then
  echo "R CMD check must end with 'Status: OK'; see $folder" >&2
  exit 1
fi
