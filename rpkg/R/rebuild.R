# Models with parts that are R functions or classes, which no file can contain. Only their weights
# and the state of the optimizer come back, and the function that built the model builds it again.

# A copy of that function for the fit. Like the workers' copy, it has the variables that it uses.
keep_builder <- function(model, model_fn) {
  if (is_rebuilt(model)) {
    return(c(unclass(model)["model_fn"], model$rebuilding["packages"]))
  }
  if (is.null(model_fn)) {
    return(NULL)
  }
  variables <- find_variables(model_fn, "model_fn")
  check_closure_size(model_fn, variables$globals, list(), "model_fn")
  parts <- list(f = utils::removeSource(model_fn), globals = variables$globals)
  copy <- unserialize(serialize(parts, NULL))
  scope <- list2env(copy$globals, parent = globalenv())
  for (name in names(copy$globals)) {
    scope[[name]] <- look_first_in(scope, copy$globals[[name]])
  }
  # If several packages export a name, the attached one is enough.
  packages <- intersect(variables$packages, attached_packages())
  list(model_fn = look_first_in(scope, copy$f), packages = packages)
}

# Make a function of the workspace, or of an environment within it, look for variables in `scope`
# before the workspace. Changes environments: only for copies.
look_first_in <- function(scope, f) {
  if (!is.function(f) || is.primitive(f)) {
    return(f)
  }
  if (identical(environment(f), globalenv())) {
    environment(f) <- scope
    return(f)
  }
  outermost <- environment(f)
  while (is_local_environment(parent.env(outermost))) {
    outermost <- parent.env(outermost)
  }
  if (identical(parent.env(outermost), globalenv()) && !identical(outermost, scope)) {
    parent.env(outermost) <- scope
  }
  f
}

is_rebuilt <- function(model) inherits(model, "tfdist_fit") && !is.null(.subset2(model, "model_fn"))

# The model of a fit, built in this session and given the weights.
rebuild_model <- function(fit) {
  attach_packages(fit$rebuilding$packages)
  model <- as_python_model(fit$model_fn)
  call_bridge("restore_model", model, weights_of(fit))
}

attach_packages <- function(packages) {
  for (package in setdiff(packages, attached_packages())) {
    check_installed(package, "The function that builds the model of this fit")
    rlang::inform(sprintf("Attaching %s, which the function that builds the model uses.", package))
    suppressPackageStartupMessages(attachNamespace(package))
  }
}

attached_packages <- function() sub("^package:", "", grep("^package:", search(), value = TRUE))

# A function that builds the model of a fit in each worker, with its current weights.
build_with_weights <- function(fit) {
  scope <- list(build = fit$model_fn, weights = weights_of(fit))
  body <- quote(reticulate::import("pybackend.bridge")$restore_model(build(), weights))
  rlang::new_function(NULL, body, list2env(scope, parent = baseenv()))
}

# Arguments for Python's `restore_model()`, from a fit.
weights_of <- function(fit) {
  text <- fit$model_base64
  if (!is.null(fit$model_uri)) {
    text <- call_bridge("read_model_text", fit$model_uri)
  }
  c(list(text = text, sha256 = fit$model_sha256), fit$rebuilding[c("inputs", "digest")])
}

# The model for Python. If it cannot be a file, it is sent as a function, and the workers run R.
as_sent_model <- function(model, seed = NULL) {
  if (!is_rebuilt(model)) {
    return(as_python_model(model, seed))
  }
  packages <- model$rebuilding$packages
  as_r_function(build_with_weights(model), packages, identity, arg = "model")
}

# Reject models that need R where Spark's own tasks use the model: they cannot run R.
check_needs_no_r <- function(model, instead) {
  if (is_rebuilt(model)) {
    problem <- "Spark's own tasks cannot use this model: parts of it are R functions or classes."
    abort_input(problem, i = instead)
  }
}
