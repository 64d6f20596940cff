#' Write and read models as text and files
#'
#' `model_to_base64()` encodes a Keras model as text that you can store in a database or a table, or
#' send in a message. `model_from_base64()` decodes it. `write_model()` writes a model or a whole
#' fit to a file. `read_fit()` reads a fit from such a file.
#'
#' @param model A Keras model (a Python object) or a [tfdist_fit].
#' @param x A [tfdist_fit], a Keras model, or the text from `model_to_base64()`. If `x` is a fit,
#'   its model is written with the optimizer's state, in either format. Text is written in the
#'   format that it was encoded in.
#' @param format `"h5"` (HDF5) or `"keras"` (Keras's native format).
#' @param include_optimizer `TRUE` includes the optimizer's state, so that training can continue
#'   later. This makes the text up to three times as long.
#' @param text The text from `model_to_base64()`.
#' @param custom_objects Named list of Python classes and functions that the model needs in addition
#'   to Keras's own.
#' @param safe_mode `TRUE` (default) rejects models that contain Python code (lambda layers). Set it
#'   to `FALSE` only for text that you trust.
#' @param sha256 Expected digest of the decoded bytes, as 64 hexadecimal digits; for a fit, it is
#'   `fit$model_sha256`. `NULL` uses the digest in the text, if there is one.
#' @param compile `TRUE` returns a compiled model, ready to evaluate and train.
#' @param path File to write. Its extension determines the format: `.h5` or `.keras` for a model;
#'   `.onnx` for a model without its training state, for ONNX Runtime; or `.json` for a whole fit.
#'   `read_fit()`, or `TrainResult.load()` in Python, reads a `.json` file. An ONNX file is written
#'   only if it computes the same as Keras, up to rounding (1e-4 of the largest value), for random
#'   rows. It needs `install_tfdist(extras = c("cpu", "onnx"))`. Functional and Sequential models
#'   can be written, except with text inputs and layers that look up or hash values.
#' @return `model_to_base64()` returns a string; `model_from_base64()` returns a Keras model;
#'   `write_model()` returns its `path`, invisibly; `read_fit()` returns a [tfdist_fit].
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' fit <- train_mnist("local", workers = 1, epochs = 1, limit = 640, verbose = 0)
#' text <- model_to_base64(fit)
#' model <- model_from_base64(text)
#' write_model(fit, tempfile(fileext = ".h5"))
#' again <- read_fit(write_model(fit, tempfile(fileext = ".json")))
model_to_base64 <- function(model, format = "h5", include_optimizer = FALSE) {
  check_given()
  check_model_object(model)
  check_one_of(format, c("h5", "keras"))
  check_flag(include_optimizer)
  encode <- pybackend()$model_to_base64
  model <- as_python_model(model)
  call_python(encode, model, format = format, include_optimizer = include_optimizer)
}

#' @rdname model_to_base64
#' @export
model_from_base64 <- function(
  text,
  custom_objects = NULL,
  safe_mode = TRUE,
  sha256 = NULL,
  compile = TRUE
) {
  check_given()
  check_string(text)
  check_custom_objects(custom_objects)
  check_flag(safe_mode)
  is_digest <- rlang::is_string(sha256) && grepl("^[0-9a-fA-F]{64}$", sha256)
  check_fits(sha256, is_digest, "a string of 64 hexadecimal digits", allow_null = TRUE)
  check_flag(compile)
  call_python(
    pybackend()$model_from_base64,
    text,
    custom_objects = custom_objects,
    safe_mode = safe_mode,
    sha256 = sha256,
    compile = compile
  )
}

#' @rdname model_to_base64
#' @export
write_model <- function(x, path) {
  check_given()
  is_text <- rlang::is_string(x) && nzchar(x) && !is_saved_model(x)
  if (!is_text) {
    check_model_object(x)
  }
  is_fit <- inherits(x, "tfdist_fit")
  check_model_path(path, c("h5", "keras", if (!is_text) "onnx", if (is_fit) "json"))
  file <- path.expand(path)
  if (endsWith(path, ".json")) {
    save_fit(x, file)
  } else if (endsWith(path, ".onnx")) {
    call_bridge("write_onnx", as_python_model(x), file)
  } else if (is_fit) {
    write_fit(x, file)
  } else {
    call_python(pybackend()$save_model, x, file)
  }
  invisible(path)
}

#' @rdname model_to_base64
#' @export
read_fit <- function(path, custom_objects = NULL, safe_mode = TRUE) {
  check_given()
  check_string(path)
  check_custom_objects(custom_objects)
  check_flag(safe_mode)
  found <- call_bridge("load_result", path.expand(path), custom_objects, safe_mode)
  columns <- list(label = found$label, labels = null_if_empty(lapply(found$labels, plain_label)))
  options <- list(custom_objects = custom_objects, safe_mode = safe_mode)
  new_fit(found$result, columns, list(model_options = options))
}

# One of describe_labels(), whose vectors a .json file stores as lists.
plain_label <- function(label) {
  list(
    levels = plain_levels(label$levels),
    ordered = isTRUE(label$ordered),
    columns = plain_levels(label$columns)
  )
}

# Save a whole fit, including what only R knows of its columns.
save_fit <- function(fit, path) {
  if (!is.null(fit$preparation) || identical(fit$model_format, "weights.h5")) {
    problem <- "This fit contains R code, which a .json file cannot store."
    abort_input(problem, i = "Use `saveRDS()`, which saves all of it for R.")
  }
  as_json_list <- function(x) if (is.character(x)) as.list(x) else x
  changes <- list(
    label = fit$label,
    labels = null_if_empty(lapply(fit$labels, lapply, as_json_list)),
    levels = as_list_or_null(fit$levels),
    features = null_if_empty(as_python_features(fit$features)),
    feature_names = null_if_empty(as_python_features(fit$feature_names)),
    categories = null_if_empty(lapply(fit$categories, as.list)),
    encode = null_if_empty(as.list(fit$encode))
  )
  call_bridge("save_result", fit$record, fit$model_base64, path, drop_null(changes))
}

# Write the trained file unchanged, or through Keras if the path has the other format.
write_fit <- function(fit, path) {
  is_weights <- identical(fit$model_format, "weights.h5")
  if (is_weights && !endsWith(path, ".weights.h5") && !is_rebuilt(fit)) {
    problem <- "Keras cannot write this model as a whole: the fit has only its weights."
    abort_input(problem, i = "Name the file *.weights.h5, and load it with `model$load_weights()`.")
  }
  save <- pybackend()$save_model
  if (!endsWith(path, paste0(".", fit$model_format))) {
    call_python(save, fit_model(fit), path, include_optimizer = TRUE)
  } else if (is.null(fit$model_uri)) {
    call_python(save, fit$model_base64, path)
  } else {
    call_bridge("copy_model", fit$model_uri, path)
  }
}

# The model of a fit: that of this session's training, or, for a fit that was read from a file,
# decoded from its text or read from its URI.
decode_fit <- function(fit) {
  if (is_rebuilt(fit)) {
    return(rebuild_model(fit))
  }
  result <- .subset2(fit, "decoded")$result
  if (!is.null(result) && !reticulate::py_is_null_xptr(result)) {
    return(call_bridge("model_of", result))
  }
  is_here <- is.null(fit$model_uri)
  call_python(
    if (is_here) pybackend()$model_from_base64 else pybackend()$bridge$read_model,
    if (is_here) fit$model_base64 else fit$model_uri,
    custom_objects = living_objects(fit$custom_objects),
    safe_mode = fit$safe_mode,
    sha256 = fit$model_sha256
  )
}

any_model <- "a compiled Keras model, a tfdist_fit or a function without arguments that returns one"

# Check what barrier_train() accepts: a model, a fit, or a function that returns a model.
check_model <- function(model, expected = any_model, arg = caller_arg(model)) {
  if (is_python(model) || inherits(model, "tfdist_fit")) {
    return(check_model_object(model, arg))
  }
  check_fits(model, is.function(model), expected, FALSE, arg, hint_saved_model(model))
  required <- required_arguments(model)
  if (length(required)) {
    problem <- "`%s` must be a function without arguments, but `%s` is required."
    abort_input(sprintf(problem, arg, required[[1L]]), i = "Wrap it: `function() build(...)`.")
  }
}

check_model_object <- function(model, arg = caller_arg(model)) {
  fits <- is_keras_model(model) || inherits(model, "tfdist_fit")
  expected <- "a Keras model (a Python object) or a tfdist_fit"
  check_fits(model, fits, expected, FALSE, arg, hint_saved_model(model))
}

hint_saved_model <- function(x) {
  if (is_saved_model(x)) {
    reader <- if (endsWith(x, ".json")) "read_fit" else "keras3::load_model"
    sprintf("Load the file: `%s(\"%s\")`.", reader, x)
  }
}

is_saved_model <- function(x) rlang::is_string(x) && grepl("[.](keras|h5|hdf5|json)$", x)

# Python functions that return a model are accepted, too.
is_keras_model <- function(model) {
  is_python(model) && (any(grepl("keras", class(model))) || is.function(model))
}

required_arguments <- function(fn) {
  arguments <- as.list(formals(args(fn)))
  arguments <- arguments[names(arguments) != "..."]
  names(arguments)[vapply(arguments, rlang::is_missing, NA)]
}

as_python_model <- function(model, seed = NULL) {
  if (is_python(model)) {
    return(model)
  }
  if (inherits(model, "tfdist_fit")) {
    return(fit_model(model))
  }
  if (!is.null(seed)) {
    # As the workers do when they build a model.
    reticulate::import("keras")$utils$set_random_seed(as.integer(seed))
  }
  built <- model()
  if (!is_keras_model(built)) {
    abort_input(
      sprintf("The `model` function must return a compiled Keras model, not %s.", describe(built)),
      i = if (is.null(built)) "Its last line must be the model: `model$compile()` returns `NULL`."
    )
  }
  built
}

check_model_path <- function(path, endings, arg = caller_arg(path)) {
  check_string(path, arg = arg)
  if (!grepl(sprintf("[.](%s)$", paste(endings, collapse = "|")), path)) {
    problem <- "`%s` must end in %s, but is %s."
    abort_input(sprintf(problem, arg, paste0(".", endings, collapse = " or "), describe(path)))
  }
  folder <- dirname(path.expand(path))
  if (!dir.exists(folder)) {
    problem <- sprintf("The directory of `%s` does not exist: %s.", arg, dirname(path))
    abort_input(problem, i = "Create it with `dir.create()`.")
  }
  if (file.access(folder, 2L) != 0L) {
    problem <- "You do not have permission to write to the directory of `%s`: %s."
    abort_input(sprintf(problem, arg, folder))
  }
}
