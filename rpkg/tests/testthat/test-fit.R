test_that("the history is long, training beside validation", {
  history <- as.data.frame(example_fit())
  expect_named(history, c("epoch", "metric", "value", "data"))
  expect_identical(history$epoch, rep(1:2, 4))
  expect_identical(levels(history$metric), c("loss", "accuracy"))
  expect_identical(history$value[history$data == "validation"], c(1.25, 1, 0.625, 0.75))
})

test_that("a fit says who trained from which epoch on", {
  answer <- list(
    workers = list(),
    workers_by_epoch = list(3L, 2L),
    generations = list(
      list(
        epoch = 1L,
        workers = list(0L, 1L, 2L),
        joined = list(),
        left = rlang::set_names(list()),
        step = 1L
      ),
      list(
        epoch = 2L,
        workers = list(1L, 3L),
        joined = list(3L),
        left = list(`0` = "a", `2` = "b"),
        step = 6L
      )
    )
  )
  fit <- new_fit(list(to_dict = function() answer))
  expect_identical(fit$workers_by_epoch, c(3L, 2L))
  expect_identical(fit$generations$workers, c("0, 1, 2", "1, 3"))
  expect_identical(fit$generations$step, c(1L, 6L))
  expect_identical(fit$generations$joined, c("", "3"))
  expect_identical(fit$generations$left, c("", "0: a, 2: b"))
  expect_identical(nrow(example_fit()$generations), 0L)
})

test_that("figures keep the numbers of their epochs", {
  answer <- list(
    history = list(loss = c(1.5, 0.75, 0.5, 0.25), val_loss = c(1, 0.5)),
    epochs_of = list(loss = list(3L, 4L, 5L, 6L), val_loss = list(4L, 6L)),
    workers = list()
  )
  fit <- new_fit(list(to_dict = function() answer))
  history <- as.data.frame(fit)
  expect_identical(history$epoch, c(3:6, 4L, 6L))
  expect_identical(wide_history(fit)$epoch, 3:6)
  expect_identical(wide_history(fit)$val_loss, c(NA, 1, NA, 0.5))
})

test_that("a metric of several values has a history for each", {
  several <- list(loss = c(2, 1), f1_score = list(c(0.25, 0.5), c(0.5, 1)), val_mse = list(3, 4))
  expect_identical(
    plain_history(several),
    list(loss = c(2, 1), f1_score_1 = c(0.25, 0.5), f1_score_2 = c(0.5, 1), val_mse = c(3, 4))
  )
  expect_identical(
    plain_history(list(f1_score = list(c(0, 1)))),
    list(f1_score_1 = 0, f1_score_2 = 1)
  )
  expect_identical(plain_history(list()), list())
})

test_that("workers are a data frame", {
  workers <- example_fit()$workers
  expect_identical(workers$rank, 0:1)
  expect_identical(workers$ok, c(TRUE, TRUE))
})

test_that("str() shows each field under its name", {
  fit <- example_fit()
  shown <- utils::capture.output(str(fit, max.level = 1))
  named <- sub("^ \\$ (\\S+) *:.*", "\\1", shown[-1L])
  expect_identical(named, setdiff(names(fit), "model"))
  expect_match(grep("$ epochs ", shown, fixed = TRUE, value = TRUE), "int")
})

test_that("fields are accessed by name", {
  fit <- example_fit()
  expect_identical(fit[["epochs"]], 2L)
  expect_null(fit$label)
  expect_snapshot(error = TRUE, {
    fit$nothing
    # Names are not matched partially.
    fit$hist
    fit$histry
    fit$feature
    fit[["work"]]
  })
})

test_that("no name of tfdist is one of keras3, so both may be attached in either order", {
  skip_if_not_installed("keras3")
  taken <- unlist(lapply(c("keras3", "tensorflow", "generics", "stats"), getNamespaceExports))
  expect_identical(intersect(getNamespaceExports("tfdist"), taken), character())
})

test_full("a fit works with keras3 attached, before tfdist or after", {
  skip_if_no_pybackend()
  skip_if_not_installed("keras3")
  path <- withr::local_tempfile(fileext = ".rds")
  model <- dense_model()
  fit <- example_fit(levels = levels(iris$Species))
  fit["model_base64"] <- list(model_to_base64(model))
  fit["model_sha256"] <- list(NULL)
  fit["decoded"] <- list(new.env(parent = emptyenv()))
  saveRDS(fit, path)
  expected <- evaluate_in_session(
    fit,
    list(x = as.matrix(iris[1:4]), y = iris$Species),
    32L
  )
  use <- "
    saved <- readRDS(commandArgs(TRUE))
    path <- write_model(saved, tempfile(fileext = '.keras'))
    folder <- tempfile()
    export_savedmodel(saved, folder)
    stopifnot(file.exists(path, file.path(folder, 'saved_model.pb')))
    figures <- evaluate(saved, as.matrix(iris[1:4]), iris$Species)
    stopifnot(identical(figures, generics::evaluate(saved, iris, label = 'Species')))
    stopifnot(nrow(predict(saved, iris[1:3, 1:4])) == 3)
    cat(format(figures, digits = 15), sep = '\n')
  "
  for (packages in list(c("tfdist", "keras3"), c("keras3", "tfdist"))) {
    attach <- paste0("suppressMessages(library(", packages, "));", collapse = "")
    script <- withr::local_tempfile(lines = c(attach, use), fileext = ".R")
    said <- system2(file.path(R.home("bin"), "Rscript"), c(script, path), stdout = TRUE)
    expect_null(attr(said, "status"))
    expect_equal(as.double(utils::tail(said, 2L)), unname(expected), tolerance = 1e-6)
  }
})
