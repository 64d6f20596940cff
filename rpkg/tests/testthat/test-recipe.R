skip_if_no_recipes <- function() {
  if (!requireNamespace("recipes", quietly = TRUE)) {
    skip_or_fail("the R package recipes is missing")
  }
}

# Loading recipes reads the system's time zone.
withr::local_envvar(TZ = "UTC", .local_envir = testthat::teardown_env())

flower_recipe <- function(rows = iris) {
  recipes::recipe(Species ~ Sepal.Length + Petal.Width + place, rows) |>
    recipes::step_normalize(recipes::all_numeric_predictors())
}

placed <- transform(iris, place = rep(c("b", "a"), 75))

test_that("a recipe is prepared by the training data and applied to later ones", {
  skip_if_no_recipes()
  columns <- choose_columns(list(), flower_recipe(placed), NULL, placed)
  found <- check_frame(placed, columns, "data")
  expect_identical(columns$label, "Species")
  expect_identical(found$feature_names, c("Sepal.Length", "Petal.Width", "place_a", "place_b"))
  expect_equal(found$x[, 1], as.vector(scale(iris$Sepal.Length)))
  expect_identical(found$y, iris$Species)
  fit <- structure(
    c(list(preparation = columns$preparation), found[c("features", "categories", "encode")]),
    class = "tfdist_fit"
  )
  expect_equal(check_newdata(placed[7:8, -5], fit)$rows, found$x[7:8, ])
  expect_identical(nrow(columns$preparation$recipe$template), 0L)

  # A recipe that is already prepared is not changed.
  prepared <- recipes::prep(flower_recipe(placed), placed[1:50, ])
  columns <- choose_columns(list(), prepared, NULL, placed)
  x <- check_frame(placed, columns, "data")$x
  expect_equal(mean(x[1:50, 1]), 0)
})

test_that("labels that a skipped step has changed are not compared with unchanged ones", {
  skip_if_no_recipes()
  rows <- transform(iris, sum = Sepal.Length + Petal.Length)
  whole <- recipes::recipe(sum ~ Sepal.Width + Petal.Width, rows)
  of <- function(recipe) {
    columns <- choose_columns(list(), recipe, NULL, rows)
    list(train = check_frame(rows, columns, "data"), later = columns)
  }
  changed <- of(recipes::step_log(whole, sum, skip = TRUE))
  expect_equal(changed$train$y, log(rows$sum))
  later <- narrow_columns(changed$later, changed$train)
  expect_error(
    check_frame(rows, later, "validation_data"),
    "`step_log` of the recipe changes the label `sum` .* skipped for `validation_data`",
    class = "tfdist_error_input"
  )
  # Predictions need no labels, and steps that select rows do not change labels.
  expect_identical(nrow(prepare_rows(later$preparation, rows[1:3, -6], "newdata")), 3L)
  for (recipe in list(
    recipes::step_log(whole, Sepal.Width, skip = TRUE),
    recipes::step_arrange(whole, sum, skip = TRUE),
    recipes::step_slice(whole, 1:99, skip = TRUE)
  )) {
    found <- of(recipe)
    expect_no_error(
      check_frame(rows, narrow_columns(found$later, found$train), "data")
    )
  }
})

test_that("a recipe that weighs rows does so when a fit is trained on", {
  skip_if_no_recipes()
  rows <- transform(iris, often = parsnip::importance_weights(rep(1:2, 75)))
  recipe <- recipes::recipe(Species ~ Sepal.Length + often, rows)
  columns <- choose_columns(list(), recipe, NULL, rows)
  fit <- example_fit(levels = levels(iris$Species))
  fit$label <- "Species"
  fit$preparation <- columns$preparation
  expect_error(barrier_train("local", fit, iris, epochs = 3), "\"often\", which is the `weight`")
})

test_full("a fit keeps its recipe, also in a file", {
  skip_if_no_recipes()
  skip_if_no_pybackend()
  train <- function(...) {
    suppressMessages(barrier_train("local", dense_model(), ..., workers = 1, seed = 1, verbose = 0))
  }
  fit <- train(placed, flower_recipe(placed))
  x <- cbind(scale(iris$Sepal.Length), scale(iris$Petal.Width), placed$place == "a")
  x <- cbind(x, 1 - x[, 3])
  by_hand <- train(list(x, iris$Species))
  expect_equal(fit_weights(fit), fit_weights(by_hand), tolerance = 1e-6)

  path <- withr::local_tempfile()
  saveRDS(fit, path)
  expect_equal(predict(readRDS(path), placed[1:5, -5]), predict(fit, placed[1:5, ]))
  expect_equal(
    barrier_evaluate("local", fit, placed, workers = 1),
    barrier_evaluate("local", by_hand, list(x, iris$Species), workers = 1),
    tolerance = 1e-5
  )
})

test_that("weights that have their role in a recipe count later, too", {
  skip_if_no_recipes()
  weighted <- transform(placed, w = parsnip::importance_weights(seq_len(150) / 10))
  recipe <- recipes::recipe(Species ~ Petal.Width + w, weighted)
  columns <- choose_columns(list(), recipe, NULL, weighted)
  fit <- example_fit()
  fit[c("preparation", "features")] <- list(columns$preparation, "Petal.Width")
  later <- complete_columns(columns_of("Species"), fit)
  found <- check_frame(weighted[1:9, ], later, "data")
  expect_identical(found$sample_weight, 1:9 / 10)
})

test_that("recipes that cannot be applied are errors", {
  skip_if_no_recipes()
  table <- structure(list(), class = c("tbl_spark", "tbl_sql", "tbl_lazy", "tbl"))
  choose <- function(recipe, data = placed, ...) {
    choose_columns(rlang::quos(...), recipe, NULL, data)
  }
  expect_snapshot(error = TRUE, {
    choose(flower_recipe(placed), table)
    choose(flower_recipe(placed), list(1, 2))
    choose(flower_recipe(placed), label = Species)
    choose(recipes::recipe(~., iris))
    choose(NULL, flower_recipe(placed))
    choose(flower_recipe(placed), iris["Species"])
  })
})
