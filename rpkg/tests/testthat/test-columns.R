test_that("what describes columns is rejected when the data have none", {
  arrays <- list(kind = "arrays")
  frame <- list(kind = "arrays", arguments_used = c("weight", "categories"))
  path <- list(kind = "path")
  weighted <- columns_of(weight = "w")
  expect_no_error(check_has_columns(weighted, frame))
  expect_no_error(check_has_columns(weighted, arrays, path))
  expect_no_error(check_has_columns(columns_of(features = "a"), arrays))
  spec <- columns_of(tfrecord_spec = c(a = "int64"))
  expect_snapshot(error = TRUE, {
    check_has_columns(weighted, arrays)
    check_has_columns(spec, frame)
  })
})

test_that("Python is given columns only if it reads them by name", {
  skip_if_no_pybackend()
  columns <- columns_of(weight = "w", categories = list(a = 1:2), in_memory = TRUE)
  arrays <- as_python_columns(columns, list(kind = "arrays"), NULL)
  expect_named(arrays, c("label", "data_options"))
  expect_null(arrays$data_options$categories)
  expect_true(arrays$data_options$in_memory)
  path <- as_python_columns(columns, list(kind = "arrays"), list(kind = "path"))
  expect_identical(path$weight, "w")
  expect_identical(path$data_options$categories, list(a = 1:2))
})

test_that("columns that do not name columns are rejected", {
  expect_identical(
    as_python_features(columns_of(features = list(left = c(x = "a", y = "b")))$features),
    list(left = list("a", "b"))
  )
  expect_identical(as_python_features(columns_of(features = "a")$features), list("a"))
  expect_length(as_python_features(columns_of()$features), 0)
  expect_snapshot(error = TRUE, {
    columns_of(label = 1)
    columns_of(features = 1:2)
    columns_of(features = list("a", "b"))
    columns_of(features = list(left = "a", left = "b"))
    columns_of(features = list("left/eye" = "a"))
    columns_of(features = list(left = character()))
    columns_of(weight = c("a", "b"))
    choose_columns(list(), NULL, list(in_memory = TRUE), iris)
  })
})

test_that("every named column must exist", {
  check <- function(present, ...) check_named_columns(columns_of(...), present, "data")
  present <- c("a", "b", "w", "label")
  expect_identical(check(present), c("a", "b", "w"))
  expect_identical(check(present, weight = "w"), c("a", "b"))
  groups <- list(left = "b", right = c("a", "b"))
  expect_identical(check(present, features = groups), groups)
  expect_snapshot(error = TRUE, {
    check(present, label = "kind")
    check(present, weight = "weight")
    check(present, features = list(left = "a", right = "c"))
    check(present, tensors = list(image = list("uint8", 4)))
    check(present, categories = list(color = "red"))
    check(present, features = list(left = "a", right = "label"))
    check(present, features = c("a", "w"), weight = "w")
    check(c("w", "label"), weight = "w")
  })
})

test_that("known levels are the categories of text, but not of codes", {
  levels <- c("no", "yes")
  of <- function(kind, columns = columns_of()) {
    columns$levels <- levels
    add_label_levels(columns, list(kind = kind), NULL)$categories$label
  }
  expect_identical(of("path"), levels)
  expect_null(of("arrays"))
  given <- columns_of(categories = list(label = c("yes", "no")))
  expect_identical(of("path", given), c("yes", "no"))
  frame <- structure(
    list(dtypes = list(list("a", "string"), list("label", "int"), list("b c", "array<string>"))),
    class = "pyspark.sql.classic.dataframe.DataFrame"
  )
  expect_true(has_text_column(frame, "a"))
  expect_false(has_text_column(frame, "label"))
  expect_false(has_text_column(frame, "b c"))
})

test_that("fields of a table's structs may be named", {
  named <- list(label = "s.y", features = list(x = c("a", "s.b"), y = "t.c"), weight = NULL)
  expect_identical(with_named_fields(c("a", "s"), named), c("a", "s", "s.y", "s.b"))
  expect_identical(with_named_fields("a", list(features = NULL)), "a")
})
