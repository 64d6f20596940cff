# Models with parts that are R functions or classes. No file holds those: their weights alone come
# back, with the state of the optimizer, and the function that has built the model builds it again.

# What a fit keeps of that function: a copy that finds what it uses in any session, as the workers'.
keep_builder <- function(model, model_fn, call = caller_env()) {
  if (is_rebuilt(model)) {
    return(c(unclass(model)["model_fn"], model$rebuilding["packages"]))
  }
  if (!is.null(model_fn)) keep_model_fn(model_fn, call)
}

keep_model_fn <- function(f, call) {
  variables <- find_variables(f, "model_fn", call)
  check_closure_size(f, variables$globals, list(), "model_fn", call)
  parts <- list(f = utils::removeSource(f), globals = variables$globals)
  copy <- unserialize(serialize(parts, NULL))
  scope <- list2env(copy$globals, parent = globalenv())
  for (name in names(copy$globals)) {
    scope[[name]] <- look_first_in(scope, copy$globals[[name]])
  }
  # Of a name that several packages export, the attached one is enough.
  packages <- intersect(variables$packages, attached_packages())
  list(model_fn = look_first_in(scope, copy$f), packages = packages)
}

# Has a function of the workspace, or of an environment within it, look for variables in `scope`
# before it does so in the workspace. Changes environments: only for copies.
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
rebuild_model <- function(fit, call) {
  attach_packages(fit$rebuilding$packages, call)
  model <- as_python_model(fit$model_fn, call)
  call_python(pybackend(call)$bridge$restore_model, model, weights_of(fit, call), call = call)
}

attach_packages <- function(packages, call) {
  for (package in setdiff(packages, attached_packages())) {
    check_installed(package, "The function that builds the model of this fit", call)
    rlang::inform(sprintf("Attaching %s, which the function that builds the model uses.", package))
    suppressPackageStartupMessages(attachNamespace(package))
  }
}

attached_packages <- function() sub("^package:", "", grep("^package:", search(), value = TRUE))

# A function that builds the model of a fit in each worker, with the weights that it has by now.
build_with_weights <- function(fit, call) {
  scope <- list(build = fit$model_fn, weights = weights_of(fit, call))
  body <- quote(reticulate::import("pybackend.bridge")$restore_model(build(), weights))
  rlang::new_function(NULL, body, list2env(scope, parent = baseenv()))
}

# Of a fit, what Python's `restore_model()` takes.
weights_of <- function(fit, call) {
  text <- fit$model_base64
  if (!is.null(fit$model_uri)) {
    text <- call_python(pybackend(call)$bridge$read_model_text, fit$model_uri, call = call)
  }
  known <- fit$rebuilding[c("inputs", "digest")]
  c(list(text = text, sha256 = fit$model_sha256), known)
}

# As Python takes it: a fit whose model cannot be a file is a function, and its workers run R.
as_sent_model <- function(model, call, seed = NULL) {
  if (!is_rebuilt(model)) {
    return(as_python_model(model, call, seed))
  }
  packages <- model$rebuilding$packages
  as_r_function(build_with_weights(model, call), packages, identity, arg = "model", call = call)
}

# Where tasks of Spark use the model, there is no R.
check_needs_no_r <- function(model, instead, call = caller_env()) {
  if (is_rebuilt(model)) {
    abort_input(
      c(
        "Spark's own tasks cannot use this model: parts of it are R functions or classes.",
        i = instead
      ),
      call = call
    )
  }
}
