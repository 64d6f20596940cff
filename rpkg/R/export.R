# A fit for other programs and other sessions.

#' Export the model of a fit
#'
#' Methods for generics in other packages. `tensorflow::export_savedmodel()`, which keras3 also
#' exports, writes the model as a SavedModel, for TensorFlow Serving and similar tools.
#' `bundle::bundle()` converts the fit to a single R object that any R session can read. `saveRDS()`
#' alone can do this, too, but only `bundle()` includes a model that is stored in a file
#' (`model_uri`).
#'
#' @param object,x A [tfdist_fit].
#' @param export_dir_base Folder to write to.
#' @param ... Arguments for Keras's `model$export()`, such as `format`. Must be empty for
#'   `bundle()`.
#'
#' @return `export_savedmodel()` returns its `object`, invisibly; `bundle()` returns a bundle.
#' @name export_fit
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready && rlang::is_installed("tensorflow")
#' fit <- train_mnist("local", workers = 1, epochs = 1, limit = 640, verbose = 0)
#' tensorflow::export_savedmodel(fit, tempfile("digits-"))
NULL

#' @rdname export_fit
#' @exportS3Method tensorflow::export_savedmodel
export_savedmodel.tfdist_fit <- function(object, export_dir_base, ...) {
  check_given()
  check_string(export_dir_base)
  path <- path.expand(export_dir_base)
  call_bridge("check_writable", path, "export_dir_base")
  model <- fit_model(object)
  # TensorFlow writes generated code to temporary files. Within R, they are not removed when Python
  # ends, so use R's own temporary folder, which is removed with the session.
  tempfile <- reticulate::import("tempfile")
  before <- tempfile$tempdir
  tempfile$tempdir <- tempdir()
  on.exit(tempfile$tempdir <- before)
  call_python(model$export, path, ..., verbose = FALSE)
  invisible(object)
}

#' @rdname export_fit
#' @exportS3Method bundle::bundle
bundle.tfdist_fit <- function(x, ...) {
  check_dots_empty(...)
  if (!is.null(x$model_uri)) {
    x["model_base64"] <- list(call_bridge("read_model_text", x$model_uri))
    x["model_uri"] <- list(NULL)
  }
  x["decoded"] <- list(new.env(parent = emptyenv()))
  situate <- bundle::situate_constr(function(object) {
    requireNamespace("tfdist")
    object
  })
  bundle::bundle_constr(object = x, situate = situate, desc_class = "tfdist_fit")
}
