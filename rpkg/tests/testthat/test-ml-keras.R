flower_table <- function(sc) {
  rows <- iris
  names(rows) <- c("a", "b", "c", "d", "kind")
  rows$id <- seq_len(nrow(rows))
  sparklyr::sdf_copy_to(sc, rows, "flowers", overwrite = TRUE)
}

test_that("what is no part of a pipeline is rejected", {
  skip_if_no_pybackend()
  skip_if_not_installed("sparklyr")
  expect_snapshot(error = TRUE, {
    ml_keras("local", dense_model)
    ml_keras(iris, dense_model)
    ml_keras(structure(list(), class = "tfdist_ml_pipeline"), dense_model, epoch = 3)
    ml_keras(structure(list(), class = "tfdist_ml_pipeline"), dense_model, features_col = 3)
    ml_keras(structure(list(), class = "tfdist_ml_pipeline"), dense_model, epochs = 0)
    ml_keras(structure(list(), class = "tfdist_ml_pipeline"), dense_model, callbacks = "stop")
  })
})

test_that("a model is a stage of sparklyr's pipelines, and is saved with them", {
  sc <- file_connection("local[2]")
  table <- flower_table(sc)
  scaled <- exchange(scale_lr = "linear")
  make_pipeline <- function(...) {
    sparklyr::ml_pipeline(sc) |>
      sparklyr::ft_string_indexer("kind", "label") |>
      sparklyr::ft_vector_assembler(c("a", "b", "c", "d"), "features") |>
      ml_keras(dense_model(), workers = 2, epochs = 3, seed = 1, exchange = scaled, ...) |>
      c(sparklyr::ft_index_to_string(sc, "prediction", "said"))
  }
  seen <- c()
  watch <- observer(on_epoch_end = function(epoch, logs) {
    seen <<- c(seen, epoch)
    epoch == 2
  })
  pipeline <- make_pipeline(
    class_weight = c("2" = 0),
    callbacks = watch,
    recovery = recovery(restarts = 1)
  )
  expect_output(print(pipeline), "<Pipeline with Keras>\n  pipeline_.*\n  KerasEstimator_")

  fitted <- sparklyr::ml_fit(pipeline, table)
  expect_s3_class(fitted, "tfdist_ml_model")
  expect_equal(seen, 1:2)
  expect_length(fitted$keras$history$loss, 2)
  expect_length(fitted$keras$history$learning_rate, 2)
  predicted <- sparklyr::sdf_persist(sparklyr::ml_predict(fitted, table))
  expect_s3_class(predicted, "tbl_spark")
  wanted <- c("prediction", "probability", "said")
  found <- dplyr::collect(dplyr::arrange(dplyr::select(predicted, id, dplyr::all_of(wanted)), id))
  scores <- fitted$keras$model$predict(as.matrix(iris[1:4]), verbose = 0L)
  expect_equal(found$prediction, max.col(scores) - 1)
  expect_identical(found$said, unlist(fitted$keras$levels)[max.col(scores)])
  powers <- exp(scores)
  numbers <- unname(do.call(rbind, found$probability))
  expect_equal(numbers, powers / rowSums(powers), tolerance = 1e-5)
  accuracy <- sparklyr::ml_multiclass_classification_evaluator(
    predicted,
    metric_name = "accuracy"
  )
  expect_equal(accuracy, mean(found$said == iris$Species))

  path <- withr::local_tempfile()
  sparklyr::ml_save(fitted, path)
  expect_error(sparklyr::ml_save(fitted, path), "overwrite = TRUE", class = "tfdist_error_input")
  expect_identical(list.files(dirname(path), paste0(basename(path), ".*")), basename(path))
  again <- ml_load_keras(sc, path)
  predicted <- sparklyr::ml_transform(again, table)
  predicted <- dplyr::select(predicted, id, dplyr::all_of(wanted))
  expect_identical(dplyr::collect(dplyr::arrange(predicted, id)), found)
  expect_identical(again$keras$levels, fitted$keras$levels)
})

test_full("a pipeline that is not fitted is saved without callbacks alone", {
  sc <- file_connection("local[2]")
  path <- withr::local_tempfile()
  make_pipeline <- function(...) {
    ml_keras(sparklyr::ml_pipeline(sc), dense_model(), class_weight = c("2" = 0), ...)
  }
  pipeline <- make_pipeline(callbacks = observer(on_epoch_end = function(epoch, logs) TRUE))
  expect_error(
    sparklyr::ml_save(pipeline, path, overwrite = TRUE),
    "`callbacks` cannot be saved",
    class = "tfdist_error_input"
  )
  pipeline <- make_pipeline(shuffle = FALSE)
  sparklyr::ml_save(pipeline, path, overwrite = TRUE)
  expect_s3_class(ml_load_keras(sc, path), "tfdist_ml_pipeline")
  expect_error(ml_load_keras(sc, tempfile()), "no pipeline", class = "tfdist_error_input")
})

test_that("options with their default values are an empty dict of Python", {
  skip_if_no_pybackend()
  options <- list(epochs = 1, seed = NULL, class_weight = NULL)
  found <- as_train_options(options)
  expect_s3_class(reticulate::r_to_py(found), "python.builtin.dict")
})
