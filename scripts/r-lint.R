# Runs lintr on the R package and these scripts; any finding is a failure.
style <- lintr::linters_with_defaults(indentation_linter = NULL)
findings <- list(
  # testthat leaves copies of failed tests in _problems.
  lintr::lint_package(
    "rpkg",
    exclusions = list("tests/testthat/_problems", "inst")
  ),
  lintr::lint_dir("scripts", linters = style)
)
for (found in findings) {
  print(found)
}
if (sum(lengths(findings)) > 0) {
  quit(status = 1)
}
