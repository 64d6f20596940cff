# Errors about unknown arguments, with what to pass instead.

# Arguments after `...` must be named. What `...` receives is misspelt, unnamed or unknown.
check_dots_empty <- function(..., call = caller_env()) {
  given <- rlang::enquos(..., .ignore_empty = "all")
  if (!length(given)) {
    return(check_given(call))
  }
  name <- rlang::names2(given)[[1L]]
  called <- name_called(call)
  if (!nzchar(name)) {
    value <- rlang::as_label(given[[1L]])
    abort_input(
      c(
        sprintf("%s got the unnamed argument %s.", called, value),
        i = sprintf("Only %s may be unnamed.", list_positions(call))
      ),
      call = call
    )
  }
  known <- names(formals(rlang::frame_fn(call)))
  instead <- find_instead(name, setdiff(known, "..."))
  abort_input(c(sprintf("%s has no argument `%s`.", called, name), i = instead), call = call)
}

# Arguments without a default.
check_given <- function(call = caller_env()) {
  required <- required_arguments(rlang::frame_fn(call))
  is_absent <- function(name) eval(as.call(list(quote(missing), as.name(name))), call)
  absent <- Filter(is_absent, required)
  if (length(absent)) {
    named <- sub("(.*), ", "\\1 and ", toString(sprintf("`%s`", absent)))
    starts_workers <- "workers" %in% names(formals(rlang::frame_fn(call)))
    advice <- if (absent[[1L]] != "sc" || starts_workers) required_advice[[absent[[1L]]]]
    abort_input(c(sprintf("%s needs %s.", name_called(call), named), i = advice), call = call)
  }
}

required_advice <- list(
  sc = "`sc = \"local\"` starts the workers on this machine. See `?barrier_train` for clusters.",
  newdata = "Pass the rows to predict; `fitted()` predicts the training rows.",
  con = "Pass a connection from `DBI::dbConnect()`.",
  model = "Pass a fit, as from `barrier_train()`, or a Keras model."
)

# "`barrier_train()`"; "The function" if do.call() received a function without a name.
name_called <- function(frame) {
  called <- rlang::frame_call(frame)
  # Users call a method by the name of its generic.
  name <- if (rlang::is_call_simple(called)) sub("[.]tfdist_.*", "", rlang::call_name(called))
  if (is.null(name)) "The function" else sprintf("`%s()`", name)
}

list_positions <- function(frame) {
  known <- names(formals(rlang::frame_fn(frame)))
  paste0("`", known[seq_len(match("...", known) - 1L)], "`", collapse = ", ")
}

find_instead <- function(name, known) {
  of_keras <- keras_arguments[[name]]
  if (!is.null(of_keras) && of_keras[[1L]] %in% known) {
    return(of_keras[[2L]])
  }
  near <- name_near(name, known)
  if (!is.null(near)) {
    return(near)
  }
  makers <- list(exchange = exchange, data_options = data_options, resources = resources)
  for (maker in intersect(names(makers), known)) {
    if (name %in% names(formals(makers[[maker]]))) {
      return(sprintf("Pass `%s = %s(%s = )`.", maker, maker, name))
    }
  }
  "See its help page for its arguments."
}

# Suggest a similar known name; NULL if there is none.
name_near <- function(name, known, quoted = "`%s`") {
  distances <- utils::adist(name, known, ignore.case = TRUE)[1L, ]
  near <- known[distances <= max(1L, nchar(name) %/% 3L)]
  near <- near[order(distances[match(near, known)])]
  begins <- if (nchar(name) > 2L) known[startsWith(known, name)]
  found <- c(near, begins)
  if (length(found)) sprintf("Did you mean %s?", sprintf(quoted, found[[1L]]))
}

# Arguments of keras3's fit(), evaluate() and predict(), and of other packages that start workers,
# that have another form here: the argument that replaces each, and the advice.
keras_arguments <- list(
  x = c("data", "Pass `data = list(x, y)`."),
  y = c("data", "Pass `data = list(x, y)`."),
  generator = c("data", "Pass as `data` a function that returns a `tf.data.Dataset` of batches."),
  sample_weight = c(
    "weight",
    "Pass the rows as `list(x, y, sample_weight)`, or name a column with `weight`."
  ),
  validation_steps = c("validation_data", "All rows of `validation_data` are used."),
  validation_batch_size = c("validation_data", "Validation takes batches of `batch_size` rows."),
  steps = c("batch_size", "All rows are used, in batches of `batch_size`."),
  view_metrics = c(
    "verbose",
    "`verbose = 1` shows progress; `plot()` of the fit draws the curves."
  ),
  optimizer = c("model", "The model has it: `compile(model, optimizer, loss, metrics)`."),
  loss = c("model", "The model has it: `compile(model, optimizer, loss, metrics)`."),
  metrics = c("model", "The model has them: `compile(model, optimizer, loss, metrics)`."),
  learning_rate = c("model", "The optimizer has it: `compile(optimizer_adam(learning_rate = ))`."),
  return_dict = c("batch_size", "The metrics are always named."),
  num_workers = c("workers", "Pass `workers`."),
  num_proc = c("workers", "Pass `workers`."),
  num_processes = c("workers", "Pass `workers`."),
  use_multiprocessing = c("workers", "Each worker is a process: pass `workers`."),
  min_workers = c("validation_data", "Pass `workers = elastic(4, min = 2, max = 8)`."),
  max_workers = c("validation_data", "Pass `workers = elastic(4, min = 2, max = 8)`."),
  resume = c("checkpoint", "Pass `checkpoint = checkpoint(folder, resume = TRUE)`."),
  roles = c("exchange", "Pass `exchange = parameter_server(servers = 1)`."),
  strategy = c(
    "exchange",
    "Leave it out, or pass `exchange = parameter_server(servers = 1)`."
  ),
  spark = c("sc", "Pass the connection as `sc`."),
  spark_context = c("sc", "Pass the connection as `sc`.")
)
