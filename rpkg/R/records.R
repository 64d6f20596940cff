#' Write and read TFRecord files in Spark
#'
#' `write_tfrecords()` writes a table as TFRecord files, with a `tf.train.Example` for each row.
#' Spark's tasks write one file for each partition. You can pass the path to the files to
#' [barrier_train()] as `data`, and any TensorFlow tool can read them. `read_tfrecords()` reads such
#' files, from any source, as a table.
#'
#' @details
#' Integers, logical values, dates (as days) and timestamps (as microseconds since 1970) become
#' lists of 64-bit integers; all other numbers become lists of 32-bit floats; text and bytes become
#' lists of bytes. A feature whose value is missing is left out of the record.
#'
#' Files written by `write_tfrecords()` are read back with the types of the original table, except
#' for the precision of doubles. In other files, the features are detected from the first records,
#' unless `tfrecord_spec` lists them.
#'
#' @param tbl A sparklyr table (`tbl_spark`), which may be a dplyr pipeline, or a PySpark DataFrame.
#' @param path A new or empty folder to write to, or a file or folder to read: a path that all
#'   machines of the cluster share, or a URI with a scheme that Python's fsspec supports.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param compression `"gzip"`, `"zlib"` or `NULL`.
#' @param overwrite `TRUE` replaces records that are already in the folder.
#' @param partitions Number of files. `NULL` (default): one for each partition that has rows.
#' @param sc A connection from `sparklyr::spark_connect()`, or a PySpark `SparkSession`.
#' @param tfrecord_spec The features to read, as a named vector of `"int64"`, `"float32"`, `"bytes"`
#'   or `"string"`, followed by `"[]"` for arrays. `NULL` (default): all features.
#' @return
#' * `write_tfrecords()`: the absolute path, invisibly.
#' * `read_tfrecords()`: a lazy table (`tbl_spark`) with a row for each record; its rows are read
#'   when they are needed. If `sc` is a `SparkSession`, it returns a PySpark DataFrame.
#' @inheritSection barrier_train Errors
#' @export
#' @examples
#' \dontrun{
#' sc <- sparklyr::spark_connect(master = "yarn")
#' digits <- dplyr::tbl(sc, "digits")
#' write_tfrecords(digits, "/shared/digits", compression = "gzip")
#' fit <- barrier_train(sc, model, "/shared/digits", label = "digit", workers = 8)
#' read_tfrecords(sc, "/shared/digits")
#' }
write_tfrecords <- function(
  tbl,
  path,
  ...,
  compression = NULL,
  overwrite = FALSE,
  partitions = NULL
) {
  check_dots_empty(...)
  is_table <- inherits(tbl, "tbl_spark") || is_spark_frame(tbl)
  check_fits(tbl, is_table, "a sparklyr table or a PySpark DataFrame")
  path <- absolute_path(check_string(path))
  check_one_of(compression, c("gzip", "zlib"), allow_null = TRUE)
  check_flag(overwrite)
  partitions <- check_count(partitions, allow_null = TRUE)

  options <- list(compression = compression, overwrite = overwrite, partitions = partitions)
  write <- function(frame) call_python(pybackend()$write_tfrecords, frame, path, !!!options)
  if (is_python(tbl)) {
    write(tbl)
  } else {
    session <- open_session(check_sc(sparklyr::spark_connection(tbl), "tbl"))
    with_spark_frame(tbl, session, write)
  }
  invisible(path)
}

#' @rdname write_tfrecords
#' @export
read_tfrecords <- function(sc, path, ..., tfrecord_spec = NULL) {
  check_dots_empty(...)
  route <- check_spark(sc)
  path <- absolute_path(check_string(path))

  read <- pybackend()$read_tfrecords
  spec <- as_list_or_null(tfrecord_spec)
  frame <- call_python(read, open_session(route), path, tfrecord_spec = spec)
  if (route$kind == "python") frame else show_spark_frame(frame, sc, "records")
}

check_spark <- function(sc, arg = caller_arg(sc)) {
  route <- check_sc(sc, arg)
  if (!has_spark(route)) {
    problem <- sprintf("`%s` is %s, which has no tables.", arg, place_without_spark(route))
    advice <- "Pass a connection from `sparklyr::spark_connect()` or a PySpark `SparkSession`."
    abort_input(problem, i = advice)
  }
  if (route$kind != "python") {
    check_installed("dplyr", "A Spark table")
  }
  route
}
