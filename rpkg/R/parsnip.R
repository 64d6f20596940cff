#' Train multilayer perceptrons in tidymodels
#'
#' When parsnip is loaded, tfdist is an engine for `parsnip::mlp()`, for classification and
#' regression: `mlp(hidden_units = 16, epochs = 20) |> set_engine("tfdist", workers = 2)`. parsnip
#' calls this function; you do not need to call it.
#'
#' @details
#' `hidden_units`, `penalty` (on the squared weights), `dropout`, `epochs`, `activation` and
#' `learn_rate` are arguments of `mlp()`. [parsnip::set_engine()] accepts `sc` (default `"local"`),
#' `workers`, and the other arguments of [barrier_train()], except those that name the model, the
#' data and its columns. Factors are one-hot encoded. Numbers are used unchanged, so normalize them
#' with a recipe. Predictions have the types `"class"` and `"prob"`, or `"numeric"`, and are missing
#' where a predictor is missing. Case weights are not supported: use [barrier_train()] with `weight`
#' or with a recipe. `extract_fit_engine()` returns the [tfdist_fit].
#'
#' @param x,y The predictors, as a data frame, and the outcome: a factor, or numbers.
#' @param hidden_units,penalty,dropout,epochs,activation,learn_rate As in `parsnip::mlp()`. If
#'   `hidden_units` has several values, each one adds a layer.
#' @param sc,verbose As in [barrier_train()].
#' @param ... Other arguments of [barrier_train()].
#' @return A [tfdist_fit].
#' @name parsnip_engine
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' fit <- train_mlp(iris[1:4], iris$Species, epochs = 2, workers = 1)
#' predict(fit, iris[1:2, 1:4])
NULL

#' @rdname parsnip_engine
#' @export
train_mlp <- function(
  x,
  y,
  hidden_units = 5L,
  penalty = 0,
  dropout = 0,
  epochs = 20L,
  activation = "relu",
  learn_rate = 0.01,
  sc = "local",
  verbose = getOption("tfdist.verbose", 0),
  ...
) {
  check_engine_arguments(names(rlang::enquos(...)))
  hidden_units <- vapply(hidden_units, function(units) check_count(units, arg = "hidden_units"), 1L)
  check_string(activation)
  check_positive(learn_rate)
  label <- ".outcome"
  options <- data_options(encode = "one_hot")
  columns <- column_spec(label, names(x), NULL, options)
  data <- x
  data[[label]] <- y
  rows <- check_frame(data, columns, "data")
  layers <- mget(c("hidden_units", "activation", "penalty", "dropout"))
  model <- function() {
    build_mlp(length(rows$feature_names), layers, nlevels(rows$y), learn_rate)
  }
  # No message about the levels of the outcome: parsnip stores them.
  withCallingHandlers(
    barrier_train(
      sc,
      model,
      data,
      label = ".outcome",
      data_options = options,
      epochs = epochs,
      verbose = verbose,
      ...
    ),
    tfdist_message_levels = function(message) rlang::cnd_muffle(message)
  )
}

# Reject arguments of barrier_train() that are set here.
check_engine_arguments <- function(given) {
  set <- c("model", "model_fn", "data", "formula", "label", "features", "data_options")
  known <- setdiff(names(c(formals(train_mlp), formals(barrier_train))), c("x", "y", "...", set))
  unknown <- setdiff(given, known)
  if (length(unknown)) {
    others <- sprintf("It takes the arguments of `barrier_train()`, except %s.", list_names(set))
    advice <- find_instead(unknown[[1L]], known, others)
    abort_input(sprintf("The engine \"tfdist\" has no argument `%s`.", unknown[[1L]]), i = advice)
  }
}

# Without classes, the model has one output number.
build_mlp <- function(inputs, layers, classes, learn_rate) {
  keras <- reticulate::import("keras")
  find <- keras$activations$get
  is_known <- tryCatch(is.function(find(layers$activation)), error = function(error) FALSE)
  if (!is_known) {
    problem <- sprintf("Keras has no activation \"%s\".", layers$activation)
    abort_input(problem, i = "Use for example \"relu\", \"tanh\" or \"gelu\".")
  }
  model <- keras$Sequential()
  model$add(keras$Input(reticulate::tuple(as.integer(inputs))))
  for (units in layers$hidden_units) {
    shrink <- if (layers$penalty > 0) keras$regularizers$L2(layers$penalty)
    dense <- keras$layers$Dense(units, layers$activation, kernel_regularizer = shrink)
    model$add(dense)
    if (layers$dropout > 0) {
      model$add(keras$layers$Dropout(layers$dropout))
    }
  }
  output <- if (classes) list(classes, activation = "softmax") else list(1L)
  model$add(do.call(keras$layers$Dense, output))
  loss <- if (classes) "sparse_categorical_crossentropy" else "mean_squared_error"
  model$compile(optimizer = keras$optimizers$Adam(learn_rate), loss = loss)
  model
}

# parsnip may be loaded before or after this package.
register_engine <- function(...) {
  if ("tfdist" %in% parsnip::get_from_env("mlp")$engine) {
    return(invisible())
  }
  func <- c(pkg = "tfdist", fun = "train_mlp")
  fit <- list(interface = "data.frame", protect = c("x", "y"), func = func, defaults = list())
  # Nothing is done to the predictors before train_mlp() gets them.
  nothing <- c("compute_intercept", "remove_intercept", "allow_sparse_x")
  encoding <- c(list(predictor_indicators = "none"), rlang::rep_named(nothing, list(FALSE)))
  for (mode in c("classification", "regression")) {
    parsnip::set_model_engine("mlp", mode, "tfdist")
    parsnip::set_dependency("mlp", "tfdist", "tfdist", mode)
    parsnip::set_fit("mlp", mode, "tfdist", fit)
    parsnip::set_encoding("mlp", mode, "tfdist", encoding)
  }
  # Names of the arguments, and dials's functions with the values to try in tuning.
  arguments <- c("hidden_units", "penalty", "dropout", "epochs", "activation", "learn_rate")
  for (name in arguments) {
    parsnip::set_model_arg("mlp", "tfdist", name, name, list(pkg = "dials", fun = name), FALSE)
  }
  set_scores <- function(mode, type, post) {
    arguments <- list(object = quote(object$fit), newdata = quote(new_data), type = "raw")
    func <- c(fun = "predict")
    value <- list(pre = NULL, post = post, func = func, args = arguments)
    parsnip::set_pred("mlp", mode, "tfdist", type, value)
  }
  set_scores("classification", "class", function(scores, object) {
    factor(object$lvl[max.col(scores, "first")], levels = object$lvl)
  })
  set_scores("classification", "prob", function(scores, object) {
    colnames(scores) <- object$lvl
    as.data.frame(scores, optional = TRUE)
  })
  set_scores("regression", "numeric", function(scores, object) scores[, 1L])
}
