check <- function(data, label = "Species", ...) {
  check_frame(data, columns_of(label, ...), "data")
}

test_that("the features are all columns except the label, or those named", {
  expect_identical(check(iris)$features, names(iris)[1:4])
  expect_identical(check(iris, features = "Sepal.Width")$features, "Sepal.Width")
})

test_that("columns that cannot be used are rejected by name", {
  missing_value <- iris
  missing_value$Petal.Width[7] <- NA
  missing_label <- iris
  missing_label$Species[3] <- NA
  dates <- transform(iris, day = Sys.Date())
  expect_snapshot(error = TRUE, {
    check(iris, label = "kind")
    check(iris, features = c("Sepal.Width", "weight"))
    check(iris, features = c("Sepal.Width", "Species"))
    check(iris["Species"])
    check(stats::setNames(iris, c("a", "", "b", "c", "Species")))
    check(unname(iris))
    check(iris[0, ])
    check(missing_value)
    check(missing_label)
    check(dates)
  })
})

test_that("what would be wrong as a number is named", {
  labelled <- structure(c(1, 2), labels = c(no = 1, yes = 2), class = c("haven_labelled", "double"))
  rows <- data.frame(y = 1:2, a = c(1, -Inf), b = factor(c("w", "u")), b_w = 1)
  expect_error(check(rows, "y", features = "a"), "\"a\" of `data` is infinite in row 2")
  expect_error(check(rows, "y", features = c("b", "b_w")), "Two features .* called \"b_w\"")
  rows$a <- labelled
  expect_error(check(rows, "y", features = "a"), "codes with labels, of class haven_labelled")
  rows$a <- as.difftime(1:2, units = "mins")
  expect_error(check(rows, "y", features = "a"), "as.numeric\\(a, units = \"mins\"\\)")
})

test_that("a frame becomes a matrix of doubles, rows by features", {
  data <- data.frame(a = 1:3, b = c(TRUE, FALSE, TRUE), c = c(0.5, 1.5, 2.5))
  expect_identical(
    frame_matrix(data, c("c", "a", "b")),
    matrix(c(0.5, 1.5, 2.5, 1, 2, 3, 1, 0, 1), 3)
  )
})

test_that("long lists of columns are shortened", {
  expect_identical(list_names(c("a", "b")), "\"a\", \"b\"")
  expect_match(list_names(letters), "\"j\" and 16 more$")
  expect_match(list_names(letters[1:11]), "\"k\"$")
})

test_that("text labels become factors of their sorted values, or of known ones", {
  rows <- data.frame(a = 1:4, label = c("pear", "Apple", "pear", "fig"))
  expect_identical(
    check(rows, "label")$y,
    factor(rows$label, levels = c("Apple", "fig", "pear"))
  )
  fruit <- c("pear", "fig", "Apple")
  expect_identical(
    check(rows, "label", categories = list(label = fruit))$y,
    factor(rows$label, levels = fruit)
  )
  trained <- c(columns_of(), list(levels = fruit))
  expect_identical(check_frame(rows, trained, "data")$y, factor(rows$label, levels = fruit))
  numbers <- data.frame(a = 1:2, label = c(1e5, 3))
  coded <- check(numbers, "label", categories = list(label = c(3, 1e5)))$y
  expect_identical(coded, factor(c("100000", "3"), levels = c("3", "100000")))
  expect_snapshot(error = TRUE, {
    check(transform(rows, label = replace(label, 2, NA)), "label")
    check(rows, "label", categories = list(label = c("pear", "fig")))
  })
})

test_that("columns with categories become codes, and one column may be the weight", {
  rows <- data.frame(
    a = c(0.5, 1.5),
    color = factor(c("red", "blue")),
    size = c("L", "S"),
    w = c(2L, 1L),
    label = 0:1
  )
  categories <- list(color = c("red", "blue", "green"), size = c("S", "M", "L"))
  found <- check(rows, "label", weight = "w", categories = categories)
  expect_identical(found$features, c("a", "color", "size"))
  expect_identical(found$x, matrix(c(0.5, 1.5, 0, 1, 2, 0), 2))
  expect_identical(found$sample_weight, c(2, 1))
  expect_snapshot(error = TRUE, {
    check(rows, "label", categories = list(color = "red", size = c("S", "L")))
    check(rows, "label", weight = "size", features = "a")
    check(rows, "label", features = "a", tensors = list(a = list("uint8", 1)))
  })
})

test_that("each named input is a matrix, of integers if all its columns are", {
  rows <- data.frame(a = 1:2, b = c(TRUE, FALSE), c = c(0.5, 1.5), label = 0:1)
  groups <- list(left = c("b", "a"), right = c("a", "c"))
  expect_identical(
    check(rows, "label", features = groups)$x,
    list(left = matrix(c(1L, 0L, 1:2), 2), right = matrix(c(1, 2, 0.5, 1.5), 2))
  )
})

test_that("numbers are the levels of a training whose label was a factor of numbers", {
  rows <- data.frame(a = 1:4, k = c(2L, 1L, 3L, 2L))
  columns <- column_spec("k", NULL, NULL, NULL)
  columns$levels <- c("1", "2", "3")
  columns$finds_levels <- FALSE
  read <- function(rows) match_levels(check_frame(rows, columns, "data"), columns$levels)$y
  expect_identical(as.character(read(rows)), c("2", "1", "3", "2"))
  expect_identical(levels(read(rows[1:2, ])), columns$levels)
  given <- list(y = c(2, 1))
  expect_identical(match_levels(given, columns$levels)$y, factor(c("2", "1"), columns$levels))
  # If the levels are not numbers, numbers are codes.
  columns$levels <- c("no", "yes", "perhaps")
  expect_identical(read(rows), rows$k)
  expect_identical(match_levels(given, columns$levels), given)
})

test_that("a column without one of its categories is a warning, as no row gets a prediction", {
  expect_warning(
    found <- complete_cases(data.frame(k = 1:3), "k", list(k = c("a", "b"))),
    "No value of column \"k\" is one of its categories \\(e\\.g\\. \"1\"\\)"
  )
  expect_false(any(found))
})
