# The example with which sparklyr's barrier mode was announced: TensorFlow's own strategy inside
# spark_apply(), and the model returned as base64 of HDF5. make_tf_config() replaces JSON written by
# hand; everything else is unchanged, including Keras 2, which the strategy needs.

test_full("MultiWorkerMirroredStrategy in spark_apply(), with make_tf_config()", {
  sc <- file_connection("local-cluster[2,1,1024]")
  for (package in c("keras", "base64enc")) {
    if (!requireNamespace(package, quietly = TRUE)) {
      skip_or_fail(paste("the R package", package, "is missing"))
    }
  }
  if (is.null(reticulate::import("importlib.util")$find_spec("tf_keras"))) {
    skip_or_fail("the Python package tf_keras is missing")
  }
  withr::local_envvar(TF_USE_LEGACY_KERAS = "1", TF_CPP_MIN_LOG_LEVEL = "2")
  # The ports that the example sets by hand.
  ports <- free_ports(2L)

  trained <- function(df, context, barrier) {
    Sys.setenv(
      TF_USE_LEGACY_KERAS = "1",
      TF_CPP_MIN_LOG_LEVEL = "2",
      RETICULATE_PYTHON = context$python,
      R_LIBS = paste(context$libraries, collapse = ":")
    )
    .libPaths(context$libraries)
    tryCatch(
      {
        hosts <- sub(":[0-9]+$", "", unlist(barrier$address))
        Sys.setenv(
          TF_CONFIG = tfdist::make_tf_config(
            paste(hosts, context$ports, sep = ":"),
            index = barrier$partition
          )
        )
        # In a loop, so that R CMD check does not require a test's packages as dependencies.
        for (package in c("tensorflow", "keras", "base64enc")) {
          library(package, character.only = TRUE)
        }
        strategy <- tf$distribute$MultiWorkerMirroredStrategy()
        num_workers <- strategy$num_replicas_in_sync
        x <- array(seq_len(32 * 4) %% 7 / 7, dim = c(32L, 4L))
        y <- array(rep(0:1, 16), dim = 32L)
        with(strategy$scope(), {
          model <- keras_model_sequential() |>
            layer_dense(4, activation = "relu", input_shape = 4) |>
            layer_dense(2)
          model |>
            compile(
              loss = tf$keras$losses$SparseCategoricalCrossentropy(from_logits = TRUE),
              optimizer = tf$keras$optimizers$SGD(learning_rate = 0.01)
            )
        })
        history <- model |> fit(x, y, batch_size = 8L * num_workers, epochs = 1, verbose = 0)
        path <- file.path(tempdir(), paste0("trained-", barrier$partition, ".hdf5"))
        save_model_hdf5(model, path)
        data.frame(
          replicas = num_workers,
          result = as.character(max(history$metrics$loss)),
          model = base64encode(path)
        )
      },
      error = function(e) data.frame(replicas = -1L, result = conditionMessage(e), model = "")
    )
  }
  environment(trained) <- globalenv()
  rows <- sparklyr::sdf_len(sc, 2, repartition = 2)
  answer <- sparklyr::collect(sparklyr::spark_apply(
    rows,
    trained,
    context = list(ports = ports, libraries = .libPaths(), python = reticulate::py_exe()),
    columns = c(replicas = "integer", result = "character", model = "character"),
    packages = FALSE,
    barrier = TRUE
  ))
  expect_identical(answer$replicas, c(2L, 2L), info = answer$result)
  expect_identical(answer$result[[1]], answer$result[[2]])
  path <- withr::local_tempfile(fileext = ".hdf5")
  writeBin(jsonlite::base64_dec(answer$model[[1]]), path)
  h5py <- reticulate::import("h5py")
  expect_true("model_weights" %in% unlist(reticulate::iterate(h5py$File(path)$keys())))
})
