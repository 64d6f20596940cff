#!/usr/bin/env bash
# usage: scripts/test-matrix.sh [SERIES...]
# Runs the routes' tests of both languages with the latest pyspark of each series (default: all
# supported series). Only pyspark and py4j differ: all other packages are those of .venv and .rlib.
set -uo pipefail
cd "$(dirname "$0")/.."
[[ $# -gt 0 ]] || set -- 3.5 4.0 4.2 4.3
root=$PWD
python=$root/.venv/bin/python
export PYSPARK_PYTHON=$python NOT_CRAN=true TFDIST_TEST_REQUIRE=1 TESTTHAT_PROBLEMS=false

use_pyspark() { # SERIES: install it, and let all processes started from now on find it
  local folder=$root/build/matrix/$1
  rm -rf "$folder"
  # constraints.txt names another pyspark.
  env -u PIP_CONSTRAINT -u PYTHONPATH "$python" -m pip install --quiet --no-input \
    --disable-pip-version-check --target "$folder" "pyspark~=$1.0" </dev/null || return
  export PYTHONPATH=$folder SPARK_HOME=$folder/pyspark
  timeout 300 "$python" scripts/executor_pyspark.py 2>"$folder.log" || { cat "$folder.log"; return 1; }
}

use_jars() { # SERIES: jars that sparklyr's R workers need and this Spark lacks
  unset TFDIST_TEST_CLASSPATH
  [[ $1 == 4.3 ]] || return 0
  scripts/apt-install.sh matrix && export TFDIST_TEST_CLASSPATH=/usr/share/java/protobuf.jar
}

# In two processes, because Connect and classic sessions conflict.
python_routes() {
  timeout 900 "$python" -m pytest tests/python/test_routes.py &&
    timeout 900 "$python" -m pytest tests/python/test_connect.py -k either_language
}

r_routes() {
  timeout 900 Rscript -e '
    results <- as.data.frame(testthat::test_file(
      "rpkg/tests/testthat/test-routes.R",
      package = "tfdist", load_package = "installed", reporter = "check"
    ))
    failed <- sum(results$failed, results$error)
    skipped <- sum(results$skipped)
    cat(sprintf("%d passed, %d failed, %d skipped\n", sum(results$passed), failed, skipped))
    quit(status = nrow(results) == 0 || failed > 0 || skipped > 0)
  '
}

failed=0
table=()
row() { table+=("$(printf '%-9s %-7s %-7s %s' "$@")"); }

run() { # LANGUAGE FUNCTION: add a row with the summary of the tests, and the skipped tests
  local log=$root/build/matrix/$series-$1.log result=passed
  "$2" 2>&1 </dev/null | tee "$log" || { result=FAILED; failed=1; }
  row "$version" "$1" "$result" "$(grep -E '[0-9]+ (passed|failed|skipped)' "$log" | tr -d '=' | paste -sd ,)"
  mapfile -t -O "${#table[@]}" table < <(grep '^SKIPPED' "$log")
}

mkdir -p build/matrix
for series; do
  echo "== pyspark $series"
  if use_pyspark "$series" && use_jars "$series"; then
    version=$("$python" -c 'import pyspark; print(pyspark.__version__)')
    run Python python_routes
    run R r_routes
  else
    failed=1
    row "$series" both FAILED "not set up: see above"
  fi
done
printf '\n%-9s %-7s %s\n' pyspark tests result
printf '%s\n' "${table[@]}"
exit "$failed"
