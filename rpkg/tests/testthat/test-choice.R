test_that("where there are no columns, nothing can be said of them", {
  arrays <- list(kind = "arrays")
  frame <- list(kind = "arrays", columns_used = c("weight", "categories"))
  path <- list(kind = "path")
  weighted <- choice_of(weight = "w")
  expect_no_error(check_columns_there(weighted, frame))
  expect_no_error(check_columns_there(weighted, arrays, path))
  expect_no_error(check_columns_there(choice_of(features = "a"), arrays))
  expect_identical(sent_choice(weighted, frame), list(label = "label"))
  expect_identical(sent_choice(weighted, arrays, path)$weight, "w")
  spec <- choice_of(tfrecord_spec = c(a = "int64"))
  expect_snapshot(error = TRUE, {
    check_columns_there(weighted, arrays, call = NULL)
    check_columns_there(spec, frame, call = NULL)
  })
})

test_that("columns, shapes and values are kept in Python's form", {
  choice <- choice_of(
    features = list(left = c(x = "a", y = "b"), right = "image"),
    weight = "w",
    tensors = list(image = list("uint8", c(28, 28)), words = list("int32", NA)),
    categories = list(color = factor(c("red", "blue")), size = c(1, 5), kind = "one"),
    tfrecord_spec = c(a = "float32", words = "int64[]")
  )
  python <- python_choice(choice)
  expect_identical(python$features, list(left = list("a", "b"), right = list("image")))
  expect_identical(
    python$tensors,
    list(image = list("uint8", list(28L, 28L)), words = list("int32", list(NULL)))
  )
  expect_identical(
    python$categories,
    list(color = list("red", "blue"), size = list(1L, 5L), kind = list("one"))
  )
  expect_identical(python$tfrecord_spec, list(a = "float32", words = "int64[]"))
  expect_identical(python_choice(choice_of(features = "a"))$features, list("a"))
  expect_length(python_choice(choice_of())$features, 0)
})

test_that("what says no columns, shapes or values is refused", {
  expect_snapshot(error = TRUE, {
    choice_of(label = 1)
    choice_of(features = 1:2)
    choice_of(features = list("a", "b"))
    choice_of(features = list(left = "a", left = "b"))
    choice_of(features = list("left/eye" = "a"))
    choice_of(features = list(left = character()))
    choice_of(weight = c("a", "b"))
    choice_of(tensors = c(image = "uint8"))
    choice_of(tensors = list(image = "uint8"))
    choice_of(tensors = list(image = list("pixel", 28)))
    choice_of(tensors = list(image = list("uint8", c(28, 0))))
    choice_of(tensors = list(image = list("uint8", c(NA, 28))))
    choice_of(categories = c("red", "blue"))
    choice_of(categories = list(color = c("red", "red")))
    choice_of(categories = list(color = character()))
    choice_of(tfrecord_spec = "int64")
    choice_of(tfrecord_spec = c(a = "double"))
    choice_of(repartition = "no")
  })
})

test_that("every column that is named must be there", {
  check <- function(columns, ...) check_chosen_columns(choice_of(...), columns, "data", NULL)
  columns <- c("a", "b", "w", "label")
  expect_identical(check(columns), c("a", "b", "w"))
  expect_identical(check(columns, weight = "w"), c("a", "b"))
  groups <- list(left = "b", right = c("a", "b"))
  expect_identical(check(columns, features = groups), groups)
  expect_snapshot(error = TRUE, {
    check(columns, label = "kind")
    check(columns, weight = "weight")
    check(columns, features = list(left = "a", right = "c"))
    check(columns, tensors = list(image = list("uint8", 4)))
    check(columns, categories = list(color = "red"))
    check(columns, features = list(left = "a", right = "label"))
    check(columns, features = c("a", "w"), weight = "w")
    check(c("w", "label"), weight = "w")
  })
})

test_that("known levels are the categories of text, but not of codes", {
  levels <- c("no", "yes")
  of <- function(kind, choice = choice_of()) {
    with_label_levels(choice, levels, list(kind = kind), NULL)$categories$label
  }
  expect_identical(of("path"), levels)
  expect_null(of("arrays"))
  own <- choice_of(categories = list(label = c("yes", "no")))
  expect_identical(of("path", own), c("yes", "no"))
  frame <- structure(
    list(dtypes = list(list("a", "string"), list("label", "int"), list("b c", "array<string>"))),
    class = "pyspark.sql.classic.dataframe.DataFrame"
  )
  expect_true(has_text_column(frame, "a"))
  expect_false(has_text_column(frame, "label"))
  expect_false(has_text_column(frame, "b c"))
})
