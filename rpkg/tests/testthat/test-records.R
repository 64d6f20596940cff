test_that("bad arguments are errors before Python is used", {
  table <- structure(list(), class = c("tbl_spark", "tbl_sql", "tbl_lazy", "tbl"))
  expect_snapshot(error = TRUE, {
    write_tfrecords(iris, "rows")
    write_tfrecords(table, 1)
    write_tfrecords(table, "rows", "gzip")
    write_tfrecords(table, "rows", compression = "zip")
    write_tfrecords(table, "rows", overwrite = 1)
    write_tfrecords(table, "rows", partitions = 0)
    read_tfrecords("local", "rows")
    read_tfrecords("yarn", "rows")
  })
})

test_full("a table becomes TFRecord files and is read back, and training uses them", {
  sc <- file_connection("local[2]")
  rows <- stats::setNames(iris, c("a", "b", "c", "d", "species"))
  rows$species <- as.character(rows$species)
  table <- sparklyr::sdf_copy_to(sc, rows, "flowers_for_records", overwrite = TRUE)
  folder <- withr::local_tempdir()
  withr::local_dir(folder)

  path <- write_tfrecords(dplyr::filter(table, a > 5), "rows", compression = "gzip")
  expect_identical(path, file.path(getwd(), "rows"))
  expect_error(write_tfrecords(table, "rows"), class = "tfdist_error_input")
  expect_identical(write_tfrecords(table, "rows", overwrite = TRUE, partitions = 3), path)
  expect_length(list.files(path, "tfrecord"), 3L)

  back <- read_tfrecords(sc, "rows")
  expect_s3_class(back, "tbl_spark")
  found <- dplyr::collect(dplyr::arrange(back, a, b, c, d, species))
  sorted <- rows[order(rows$a, rows$b, rows$c, rows$d, rows$species), ]
  expect_identical(names(found), names(rows))
  expect_equal(as.data.frame(found), as.data.frame(sorted), tolerance = 1e-6, ignore_attr = TRUE)
  two <- read_tfrecords(sc, path, tfrecord_spec = c(a = "float32", species = "bytes"))
  expect_identical(colnames(two), c("a", "species"))
  counted <- dplyr::collect(dplyr::count(dplyr::filter(back, species == "setosa")))
  expect_equal(counted$n, 50)

  # With a PySpark session, tables are DataFrames.
  session <- open_session(check_sc(sc))
  frame <- read_tfrecords(session, path)
  expect_identical(frame$count(), 150L)
  write_tfrecords(frame, "again")
  expect_true(file.exists("again/_SUCCESS"))

  train <- function(data, sc, ...) {
    suppressMessages(barrier_train(
      sc,
      dense_model(),
      data,
      ...,
      label = "species",
      workers = 2,
      seed = 1,
      verbose = 0
    ))
  }
  spec <- c(a = "float32", b = "float32", c = "float32", d = "float32", species = "string")
  spark <- train(path, sc)
  here <- train(path, "local", data_options = data_options(tfrecord_spec = spec))
  expect_equal(fit_weights(spark), fit_weights(here), tolerance = 1e-6)
  expect_identical(spark$levels, levels(iris$Species))
  expect_identical(spark$features, c("a", "b", "c", "d"))
  expect_identical(sum(spark$workers$rows), 150L)
})
