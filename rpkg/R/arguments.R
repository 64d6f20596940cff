# Checks of the arguments that several calls share.

# Checked values of the arguments with these names, taken from the calling function.
check_arguments <- function(names, frame = caller_env()) {
  values <- mget(names, envir = frame)
  if (all(c("workers", "roles") %in% names) && !is.null(values$roles)) {
    # The counts of the roles replace the option `tfdist.workers`.
    values["workers"] <- list(if (!eval(quote(missing(workers)), frame)) values$workers)
  }
  Map(
    function(value, name) check_argument(value, name, frame, name_argument(name, frame)),
    values,
    names
  )
}

check_argument <- function(x, name, call, arg = name) {
  switch(
    name,
    epochs = ,
    batch_size = check_count(x, arg = arg, call = call),
    validation_freq = check_validation_freq(x, arg = arg, call = call),
    initial_epoch = check_count(x, min = 0L, arg = arg, call = call),
    workers = check_workers(x, arg = arg, call = call),
    steps_per_epoch = ,
    limit = ,
    partitions = check_count(x, allow_null = TRUE, arg = arg, call = call),
    seed = check_count(x, min = 0L, allow_null = TRUE, arg = arg, call = call),
    validation_split = check_fraction(x, arg = arg, call = call),
    timeout = check_positive(x, arg = arg, call = call),
    safe_mode = check_flag(x, arg = arg, call = call),
    restarts = check_count(x, min = 0L, arg = arg, call = call),
    checkpoint = check_checkpoint(x, arg = arg, call = call),
    scale_lr = check_scale_lr(x, arg = arg, call = call),
    resources = check_options(x, "resources", arg = arg, call = call),
    roles = check_roles(x, arg = arg, call = call),
    tensorboard = check_tensorboard(x, arg = arg, call = call),
    shuffle = check_shuffle(x, arg = arg, call = call),
    verbose = check_verbose(x, arg = arg, call = call),
    callbacks = check_callbacks(x, arg = arg, call = call),
    class_weight = check_class_weight(x, arg = arg, call = call),
    custom_objects = check_custom_objects(x, arg = arg, call = call),
    model_uri = check_model_uri(x, arg = arg, call = call),
    detach = check_detach(x, arg = arg, call = call),
    abort(sprintf("There is no check for `%s`.", name), .internal = TRUE)
  )
}

# TRUE, FALSE, or the folder of the job.
check_detach <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (is.character(x)) {
    return(path.expand(check_string(x, arg = arg, call = call)))
  }
  if (check_flag(x, arg = arg, call = call)) jobs_folder() %||% TRUE else FALSE
}

# barrier_train() and plan() also take the result of elastic().
check_workers <- function(x, arg, call) {
  if (inherits(x, "tfdist_elastic") && exists("validation_data", call, inherits = FALSE)) {
    return(invisible(x))
  }
  check_count(x, allow_null = TRUE, arg = arg, call = call)
}

# A number of epochs, or the numbers of the epochs that end with a validation.
check_validation_freq <- function(x, arg = caller_arg(x), call = caller_env()) {
  # A fit stores the epochs as a list.
  x <- unlist(x)
  is_whole <- length(x) > 0L && is.numeric(x) && rlang::is_integerish(x, finite = TRUE)
  is_whole <- is_whole && all(x >= 1 & x <= .Machine$integer.max)
  if (!is_whole) {
    expected <- "a whole number of at least 1, or a vector of the epochs to validate after"
    abort_expected(x, expected, FALSE, arg, call)
  }
  invisible(if (length(x) == 1L) as.integer(x) else as.list(as.integer(x)))
}

# Counts of workers by role, as a list for Python, which checks the names and combinations.
check_roles <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (is.null(x)) {
    return(invisible(NULL))
  }
  counts <- unlist(x)
  is_count <- length(counts) == length(x) && is.numeric(counts)
  is_count <- is_count && rlang::is_integerish(counts, finite = TRUE)
  if (!is_count || !rlang::is_named(x) || any(counts < 0) || anyDuplicated(names(x))) {
    abort_expected(x, "counts of workers by role, e.g. `c(chief = 1, worker = 2)`", TRUE, arg, call)
  }
  invisible(as.list(counts))
}

check_verbose <- function(x, arg = caller_arg(x), call = caller_env()) {
  level <- if (rlang::is_bool(x)) as.integer(x) else x
  invisible(as.integer(check_one_of(level, 0:2, arg = arg, call = call)))
}

check_shuffle <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (!rlang::is_bool(x) && !(rlang::is_string(x, c("shard", "global")))) {
    expected <- "`TRUE`, `FALSE`, \"shard\" or \"global\""
    abort_expected(x, expected, FALSE, arg, call)
  }
  invisible(x)
}

check_callbacks <- function(x, arg = caller_arg(x), call = caller_env()) {
  is_callback <- function(x) is_python(x) || is_observer(x) || is_tracker(x)
  if (is_callback(x)) {
    x <- list(x)
  }
  if (!is.null(x) && !is.list(x)) {
    expected <- "a list of Keras callbacks (Python objects), observers and trackers"
    abort_expected(x, expected, TRUE, arg, call, hint = hint_observer(x))
  }
  for (i in seq_along(x)) {
    if (!is_callback(x[[i]])) {
      expected <- "a Keras callback (a Python object), an observer or a tracker"
      element <- sprintf("%s[[%d]]", arg, i)
      abort_expected(x[[i]], expected, FALSE, element, call, hint = hint_observer(x[[i]]))
    }
  }
  invisible(if (length(x)) unname(x))
}

hint_observer <- function(x) {
  if (is.function(x)) {
    "Pass `observer(on_epoch_end = )`, which calls your function in this session."
  }
}

check_custom_objects <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (is.null(x) || inherits(x, "python.builtin.dict")) {
    return(invisible(x))
  }
  if (!is.list(x) || is_python(x) || !rlang::is_named(x)) {
    abort_expected(x, "a named list of Python classes or functions", TRUE, arg, call)
  }
  invisible(x)
}

# A path or URI that workers write to. It becomes absolute: their working directory differs.
check_model_uri <- function(x, arg = caller_arg(x), call = caller_env()) {
  if (!is.null(x)) absolute_path(check_string(x, arg = arg, call = call))
}
