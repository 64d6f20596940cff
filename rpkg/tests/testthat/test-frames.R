check <- function(data, label = "Species", features = NULL) {
  check_frame(data, label, features, "data", NULL)
}

test_that("the features are all columns but the label, or those named", {
  expect_identical(check(iris), names(iris)[1:4])
  expect_identical(check(iris, features = "Sepal.Width"), "Sepal.Width")
})

test_that("columns that cannot be used are named", {
  missing_value <- iris
  missing_value$Petal.Width[7] <- NA
  missing_label <- iris
  missing_label$Species[3] <- NA
  text_label <- transform(iris, Species = as.character(Species))
  dates <- transform(iris, day = Sys.Date())
  expect_snapshot(error = TRUE, {
    check(iris, label = "kind")
    check(iris, features = c("Sepal.Width", "weight"))
    check(iris, label = "Sepal.Width")
    check(iris, features = c("Sepal.Width", "Species"))
    check(iris["Species"])
    check(iris[0, ])
    check(missing_value)
    check(missing_label)
    check(text_label)
    check(dates)
  })
})

test_that("a frame becomes a matrix of doubles, rows by features", {
  data <- data.frame(a = 1:3, b = c(TRUE, FALSE, TRUE), c = c(0.5, 1.5, 2.5))
  expect_identical(
    frame_matrix(data, c("c", "a", "b")),
    matrix(c(0.5, 1.5, 2.5, 1, 2, 3, 1, 0, 1), 3)
  )
})

test_that("many columns are listed in part", {
  expect_identical(list_names(c("a", "b")), "\"a\", \"b\"")
  expect_match(list_names(letters), "\"j\" and 16 more$")
})
