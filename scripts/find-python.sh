#!/usr/bin/env bash
# Prints a Python for which TensorFlow has wheels: $PYTHON, or python3, or a versioned one.
set -euo pipefail
candidates=(python3 python3.13 python3.12 python3.11)
if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
for candidate in "${candidates[@]}"; do
  path=$(command -v "$candidate") || continue
  if "$path" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    echo "$path"
    exit 0
  fi
done
echo "tfdist needs Python 3.11 to 3.13; set PYTHON=/path/to/python3" >&2
exit 1
