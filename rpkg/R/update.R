# Continued training of a fit.

#' Continue the training of a fit
#'
#' `update()` trains a fit's model for more epochs, starting from the saved state of its optimizer.
#' Arguments that you do not pass are the same as in the original call: settings have the same
#' values, and variables that the call named, such as `data`, are looked up again where you call
#' `update()`. `generics::fit()`, which keras3 also exports, does the same.
#'
#' @param object A [tfdist_fit].
#' @param ... Named arguments of [barrier_train()] that differ from those of the original call, such
#'   as different `data` or a different `sc`. Pass `data` again for a fit from [train_mnist()], or
#'   if `data` was a value and not the name of a variable. A fit does not store `recovery` or
#'   `model_options` either, because they belong to a single training run. A formula or a recipe is
#'   part of the fit. A fit from a `.json` file has no arguments: pass it to [barrier_train()] as
#'   the model.
#' @param epochs Number of additional epochs, numbered after those of the fit. `NULL` (default): the
#'   same number as before.
#' @return A new [tfdist_fit]. Its history contains only the additional epochs; with the same data,
#'   they match those of an uninterrupted run.
#' @seealso [barrier_train()], which accepts a fit as its `model`, too.
#' @exportS3Method stats::update
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' digits <- mnist(limit = 640)
#' data <- list(digits$x_train / 255, digits$y_train)
#' first <- train_mnist("local", workers = 1, epochs = 1, limit = 640, verbose = 0)
#' fit <- update(first, sc = "local", data = data, epochs = 2, verbose = 0)
#' as.data.frame(fit)
update.tfdist_fit <- function(object, ..., epochs = NULL) {
  given <- as.list(match.call(expand.dots = FALSE)$...)
  train_on(object, given, epochs, parent.frame())
}

#' @exportS3Method generics::fit
fit.tfdist_fit <- update.tfdist_fit

train_on <- function(fit, given, epochs, frame) {
  # As in `update(fit, . ~ . - x)` of other models.
  if (any(vapply(given[!nzchar(rlang::names2(given))], rlang::is_call, NA, "~"))) {
    problem <- sprintf(
      "%s trains the model further, and keeps its columns.",
      name_called()
    )
    advice <- "Train a new model, whose inputs fit another formula, with `barrier_train()`."
    abort_input(problem, i = advice)
  }
  check_update_names(rlang::names2(given))
  epochs <- check_count(epochs %||% max(1L, fit$epochs), arg = "epochs")
  settings <- fit$settings[names(fit$settings) %in% names(formals(barrier_train))]
  known <- c(given, settings[setdiff(names(settings), names(given))])
  known <- c(known, fit$call[setdiff(names(fit$call), names(known))])
  if (!"seed" %in% names(known)) {
    # The seed was drawn, so it is not among the settings.
    known$seed <- fit$seed
  }
  check_update_known(known, given, frame)
  if (!length(fit$settings) && !length(fit$call)) {
    abort_input(
      "This fit has no arguments of its training: it was read from a .json file, or is Python's.",
      i = "Pass it as the model, with all arguments: `barrier_train(sc, fit, data, ...)`.",
      i = "A fit that `saveRDS()` saved has them."
    )
  }
  if (is.null(given$initial_epoch)) {
    done <- (fit$settings$initial_epoch %||% 0L) + fit$epochs
    known$initial_epoch <- done
    epochs <- done + epochs
  }
  known$epochs <- epochs
  # Pass the fit by a name, because errors show the call.
  scope <- rlang::env(frame, .tfdist_fit = fit)
  eval(as.call(c(quote(tfdist::barrier_train), list(model = quote(.tfdist_fit)), known)), scope)
}

check_update_names <- function(names) {
  takes <- setdiff(names(formals(barrier_train)), c("model", "model_fn", "..."))
  unknown <- setdiff(names, takes)
  if (length(unknown)) {
    name <- unknown[[1L]]
    what <- if (nzchar(name)) {
      sprintf("`%s` is not an argument of `barrier_train()` that can change.", name)
    } else {
      sprintf("The arguments of %s must be named.", name_called())
    }
    near <- if (!name %in% c("", "model", "model_fn")) find_instead(name, takes, NULL)
    called <- sub("()`", "", name_called(), fixed = TRUE)
    example <- sprintf("For example %1$s(fit, epochs = 10)` or %1$s(fit, data = rows)`.", called)
    abort_input(what, i = near %||% example)
  }
}

# A fit has the names of its data, not the data.
check_update_known <- function(known, given, frame) {
  unknown <- setdiff(c("sc", "data"), names(known))
  if (length(unknown)) {
    named <- paste0("`", unknown, "`", collapse = " and ")
    problem <- sprintf("This fit does not store the %s of its training.", named)
    abort_input(problem, i = sprintf("Pass %s.", named))
  }
  for (name in setdiff(intersect(names(known), evaluated_names), names(given))) {
    value <- known[[name]]
    if (is.symbol(value) && !is_variable(as.character(value), frame)) {
      abort_input(
        sprintf("`%s` of the training was `%s`, which does not exist here.", name, format(value)),
        i = sprintf("Pass `%s`.", name)
      )
    }
  }
}

# `df`, `data`, ... are functions of packages wherever no variable has the name.
is_variable <- function(name, frame) {
  value <- get0(name, envir = frame, ifnotfound = c)
  !is.primitive(value) && !(is.function(value) && isNamespace(environment(value)))
}

# Arguments of barrier_train() that are values, not names of columns.
evaluated_names <- c("sc", "data", "validation_data", "callbacks", "model_options", "data_options")

# The settings of a training run as plain values of R, without those that were left out, or that
# belong to one training only.
plain_settings <- function(settings) {
  settings <- settings[setdiff(names(settings), c("callbacks", "model_options", "recovery"))]
  settings[!vapply(settings, function(value) is.null(value) || is_python(value), NA)]
}

# Arguments of a call that are names, to evaluate them again. Values in a call, as from `do.call()`
# and `!!`, may be large and are not stored. The fit is the next model, and has a formula's columns.
plain_call <- function(call) {
  # A job stores them as a list.
  arguments <- if (is.call(call)) as.list(call)[-1L] else as.list(call)
  columns <- c("label", "features", "weight")
  left_out <- c("model", "model_fn", "formula", "folder")
  left_out <- c(left_out, setdiff(barrier_train_options, c(columns, evaluated_names)))
  arguments <- arguments[setdiff(names(arguments), left_out)]
  is_name <- function(argument) {
    is_one <- is.atomic(argument) && length(argument) == 1L
    (is.language(argument) || is_one) && utils::object.size(argument) < 1e5
  }
  arguments[vapply(arguments, is_name, NA)]
}
