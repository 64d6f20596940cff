count <- function(...) as.vector(tfdist_shape(...))

test_that("the numbers of a row are counted as a training feeds them", {
  expect_identical(count(iris, Species ~ .), 4L)
  expect_identical(count(iris, Sepal.Length ~ .), 6L)
  expect_identical(count(iris, label = Species), 4L)
  expect_identical(count(iris, label = Species, features = c(Petal.Length, Petal.Width)), 2L)
  expect_identical(count(mtcars, mpg ~ log(disp) + factor(gear) * hp), 8L)
  names <- attr(tfdist_shape(iris, Sepal.Length ~ Species), "feature_names")
  expect_identical(names, paste0("Species_", levels(iris$Species)))
  inputs <- list(left = c("Sepal.Width", "Species"), right = "Petal.Width")
  several <- tfdist_shape(iris, label = Sepal.Length, features = inputs)
  expect_identical(several$left, 4L)
  expect_identical(several$right, 1L)
  skip_if_not_installed("recipes")
  recipe <- recipes::step_dummy(recipes::recipe(Sepal.Length ~ ., iris), Species)
  expect_identical(count(iris, recipe), 5L)
})

test_that("errors are those of a training", {
  expect_snapshot(error = TRUE, {
    tfdist_shape(as.matrix(iris[1:4]), Species ~ .)
    tfdist_shape(iris, label = Sepcies)
    tfdist_shape(iris, Species ~ ., fetures = 1)
  })
})
