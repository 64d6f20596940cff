choose <- function(data = iris, ..., label, features = NULL, weight = NULL) {
  given <- list(
    label = if (!missing(label)) rlang::enquo(label),
    features = rlang::enquo(features),
    weight = rlang::enquo(weight)
  )
  choose_columns(given, NULL, NULL, data)[c("label", "features", "weight")]
}

test_that("columns are selected as with tidyselect", {
  sepal <- c("Sepal.Length", "Sepal.Width")
  expect_identical(choose(label = Species)$label, "Species")
  expect_identical(choose(label = Species, features = starts_with("Sepal"))$features, sepal)
  expect_identical(choose(label = Species, features = 1:2)$features, sepal)
  # "All but" does not include the label.
  expect_identical(
    choose(label = Species, features = -Petal.Length)$features,
    names(iris)[-c(3, 5)]
  )
  weighted <- choose(label = Species, features = where(is.numeric), weight = Petal.Width)
  expect_identical(weighted$features, names(iris)[1:3])
  expect_identical(weighted$weight, "Petal.Width")
  groups <- choose(
    label = Species,
    features = list(left = c(Sepal.Length, Petal.Width), right = ends_with("Width"), all = sepal)
  )
  expect_identical(
    groups$features,
    list(left = names(iris)[c(1, 4)], right = names(iris)[c(2, 4)], all = sepal)
  )
})

test_that("strings, and variables that hold them, name columns", {
  columns <- c("Sepal.Length", "Petal.Width")
  by <- list(label = "Species", groups = list(left = columns, right = "Sepal.Width"))
  expect_identical(choose(label = "Species", features = columns)$features, columns)
  expect_identical(choose(label = by$label, features = all_of(columns))$features, columns)
  expect_identical(choose(label = by$label, features = by$groups)$features, by$groups)
  expect_identical(choose(label = by$label, features = names(iris)[1:2])$features, names(iris)[1:2])
  # If the columns are not known, names are used unchanged.
  expect_identical(choose(list(1, 2), label = y)$label, "y")
})

test_that("selections that select nothing, or too much, are errors", {
  expect_snapshot(error = TRUE, {
    choose(label = Species, features = c(Sepal.Length, sepal))
    choose(label = c(Species, Sepal.Length))
    choose(label = starts_with("z"))
    choose(label = Species, features = c(left = Sepal.Length))
    choose(list(1, 2), label = "y", features = starts_with("x"))
    choose(label = 1)
  })
})

test_that("a selection of features that selects none is named", {
  expect_error(
    choose(label = Species, features = starts_with("zz")),
    'starts_with\\("zz"\\)` selects no column of `data`.*Sepal.Length'
  )
})

test_that("names of the columns of files are read when they are needed", {
  skip_if_no_pybackend()
  path <- withr::local_tempfile(fileext = ".parquet")
  pandas <- reticulate::import("pandas", convert = FALSE)
  pandas$DataFrame(list(id = 1:3, a = c(0.5, 1, 2), b = 3:1, y = c(0L, 1L, 0L)))$to_parquet(path)
  expect_identical(choose(path, label = y, features = -id)$features, c("a", "b"))
  of <- choose_columns(list(), y ~ . - id, NULL, path)
  expect_identical(of$features, c("a", "b"))
})
