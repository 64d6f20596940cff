# Recipes of the package recipes: prepared with the training data, and applied to all later data.

recipe_columns <- function(recipe, data, options) {
  check_installed("recipes", "A recipe")
  check_can_prepare(structure(list(), class = "tfdist_recipe"), data, "data")
  is_prepped <- recipes::fully_trained(recipe)
  if (!is_prepped) {
    recipe <- run_recipe(recipes::prep(recipe, training = data, retain = TRUE), "data")
  }
  roles <- summary(recipe)
  role_of <- function(role) roles$variable[roles$role %in% role]
  label <- role_of("outcome")
  if (length(label) != 1L) {
    problem <- sprintf("The recipe has %d outcomes, but the model needs one label.", length(label))
    abort_input(problem, i = "Name it in the recipe: `recipe(y ~ ., data)`.")
  }
  weight <- null_if_empty(role_of("case_weights"))
  columns <- column_spec(label, role_of("predictor"), weight, options)
  if (!is_prepped) {
    # Steps with `skip = TRUE` are for the rows of the training only.
    columns$rows <- plain_weights(recipes::bake(recipe, new_data = NULL), weight)
  }
  skipped <- if (!is_prepped) find_skipped(recipe, data, label)
  recipe$template <- recipe$template[0L, ]
  prepared <- list(recipe = recipe, label = label, weight = weight, skipped = skipped)
  columns$preparation <- structure(prepared, class = "tfdist_recipe")
  columns
}

# Class of the step that changed the label in the training and is skipped for later rows, or NULL.
# A step that only removes or sorts rows does not add new labels.
find_skipped <- function(recipe, data, label) {
  if (!any(vapply(recipe$steps, function(step) isTRUE(step$skip), NA))) {
    return(NULL)
  }
  rows <- tibble::as_tibble(data)
  for (step in recipe$steps) {
    after <- tryCatch(recipes::bake(step, new_data = rows), error = function(error) NULL)
    if (is.null(after)) {
      return(NULL)
    }
    if (isTRUE(step$skip) && !all(after[[label]] %in% rows[[label]])) {
      return(class(step)[[1L]])
    }
    rows <- after
  }
  NULL
}

bake_rows <- function(preparation, data, arg, with_label) {
  recipe <- preparation$recipe
  if (!with_label) {
    return(run_recipe(recipes::bake(recipe, data, recipes::all_predictors()), arg))
  }
  if (!is.null(preparation$skipped)) {
    text <- "`%s` of the recipe changes the label `%s` in the training, and is skipped for `%s`."
    advice <- "Metrics of unchanged labels are not comparable: change the labels before the recipe."
    abort_input(sprintf(text, preparation$skipped, preparation$label, arg), i = advice)
  }
  rows <- run_recipe(recipes::bake(recipe, data), arg)
  plain_weights(rows, preparation$weight)
}

# hardhat's weights are a class of their own.
plain_weights <- function(rows, weight) {
  if (!is.null(weight) && !is.null(rows[[weight]])) {
    rows[[weight]] <- as.double(rows[[weight]])
  }
  rows
}

run_recipe <- function(code, arg) {
  or_abort(code, sprintf("The recipe cannot be applied to `%s`.", arg))
}
