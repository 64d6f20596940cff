# Formulas: `y ~ a + b`, `y ~ . - id`; with `log(a)` or `a:b` on data frames.

formula_columns <- function(formula, data, weight, options) {
  terms <- read_formula(formula, data, weight, options)
  options <- options %||% data_options()
  # As in lm(), regardless of the other columns.
  options["encode"] <- list(options$encode %||% "one_hot")
  response <- attr(terms, "variables")[[2L]]
  features <- vapply(attr(terms, "term.labels"), bare_name, "", USE.NAMES = FALSE)
  computed <- c(if (!is.symbol(response)) deparse_line(response), computed_terms(terms, features))
  if (!length(computed)) {
    columns <- column_spec(as.character(response), features, weight, options)
    columns$formula <- formula
    return(columns)
  }
  computed <- sprintf("`%s`", computed[[1L]])
  unprepared <- structure(list(computed = computed), class = "tfdist_formula")
  check_can_prepare(unprepared, data, "data")
  if (!identical(options$encode, "one_hot")) {
    abort_input(
      sprintf("`encode` needs a formula of columns only, but `formula` computes %s.", computed),
      i = "Leave out `encode`: all text then becomes one-hot."
    )
  }
  preparation <- prepare_formula(terms, data, computed, options$categories)
  options["categories"] <- list(NULL)
  columns <- column_spec(preparation$label, NULL, weight, options)
  c(columns, list(formula = formula, preparation = preparation))
}

# The terms of a formula, in which `.` stands for all columns except the label and the weight.
read_formula <- function(formula, data, weight, options) {
  if (!rlang::is_formula(formula, lhs = TRUE)) {
    abort_input("`formula` has no label.", i = "Name it on the left: `y ~ a + b`.")
  }
  # A list of arrays has no label by name; a table is a list with a class.
  names <- if (!rlang::is_bare_list(data)) column_names(known_columns(data))
  if (is.null(names) && "." %in% all.vars(formula)) {
    names <- read_columns(data, options)
  }
  if (is.null(names) && !is_paths(data)) {
    abort_input(
      sprintf("`formula` names columns, and `data` has none: it is %s.", describe(data)),
      i = if (is.array(data)) "Pass `as.data.frame(data)`, with the label as a column.",
      i = "Pass a data frame, a Spark table or the path of files."
    )
  }
  names <- setdiff(names, weight)
  rows <- rlang::set_names(rep(list(logical()), length(names)), names)
  # R warns about a column that a minus removes and that is not part of `.`
  read <- function() suppressWarnings(stats::terms(formula, data = rows))
  terms <- tryCatch(read(), error = function(error) {
    abort_input("`formula` cannot be read.", x = conditionMessage(error))
  })
  check_terms(terms, weight)
  terms
}

check_terms <- function(terms, weight) {
  if (!is.null(attr(terms, "offset"))) {
    problem <- "`formula` has an offset, which is not supported."
    advice <- "Make the column an input of the model, and add it there."
    abort_input(problem, i = advice)
  }
  variables <- as.list(attr(terms, "variables"))[-1L]
  groups <- Filter(function(expr) rlang::is_call(expr, c("|", "||")), variables)
  if (length(groups)) {
    text <- "`formula` has `%s`: random effects and groups are not supported."
    problem <- sprintf(text, deparse_line(groups[[1L]]))
    advice <- "Make the group a feature, such as `y ~ x + group`. The logical or is `I(a | b)`."
    abort_input(problem, i = advice)
  }
  is_contrast <- function(expr) is.call(expr) && deparse_line(expr[[1L]]) %in% c("C", "stats::C")
  if (any(vapply(variables, is_contrast, NA))) {
    problem <- "`formula` sets contrasts, which are not used: each level of a factor has a column."
    advice <- "Use the column's name alone, or compute its columns with `model.matrix()` first."
    abort_input(problem, i = advice)
  }
  labels <- attr(terms, "term.labels")
  if (!length(labels)) {
    problem <- "`formula` names no feature."
    abort_input(problem, i = "Name some on the right: `y ~ a + b`, or `y ~ .`")
  }
  targets <- c(all.vars(attr(terms, "variables")[[2L]]), weight)
  both <- intersect(targets, all.vars(str2expression(labels)))
  if (length(both)) {
    problem <- if (both[[1L]] %in% weight) {
      "`formula` has the weight `%s` among the features."
    } else {
      "`formula` has `%s` on both sides."
    }
    abort_input(sprintf(problem, both[[1L]]), i = "Leave it out on the right.")
  }
}

# NA for a term that is not the name of a column.
bare_name <- function(term) {
  expr <- str2lang(term)
  if (is.symbol(expr)) as.character(expr) else NA_character_
}

computed_terms <- function(terms, features) attr(terms, "term.labels")[is.na(features)]

deparse_line <- function(expr) paste(deparse(expr, width.cutoff = 500L), collapse = " ")

# Values that come from the training data: `predvars`, as of poly() or scale(), and levels.
prepare_formula <- function(terms, data, computed, categories) {
  # An intercept is the model's bias, and all levels of factors have columns, with or without one.
  attr(terms, "intercept") <- 1L
  factors <- attr(terms, "factors")
  attr(terms, "factors") <- pmin(factors, 1L)
  frame <- formula_frame(terms, data, "data")
  terms <- attr(frame, "terms")
  predictors <- as.list(frame)[-attr(terms, "response")]
  check_predictors(predictors)
  check_by_row(terms, data, predictors)
  is_text <- vapply(predictors, function(column) is.factor(column) || is.character(column), NA)
  levels <- lapply(predictors[is_text], column_values)
  # A logical column is 0 or 1, except in `flag:a` without `a`, where FALSE has its own slope.
  is_flag <- vapply(predictors, is.logical, NA) & apply(factors == 2L, 1L, any)[names(predictors)]
  levels[names(predictors)[is_flag]] <- list(c(FALSE, TRUE))
  given <- intersect(names(levels), names(categories))
  levels[given] <- categories[given]
  used <- all.vars(stats::delete.response(terms))
  inform_variables(setdiff(used, names(data)))
  structure(
    list(
      terms = terms,
      levels = levels,
      label = names(frame)[[attr(terms, "response")]],
      variables = intersect(used, names(data)),
      label_variables = intersect(all.vars(attr(terms, "variables")[[2L]]), names(data)),
      computed = computed
    ),
    class = "tfdist_formula"
  )
}

# Reject terms that depend on all rows, such as rank(a): they would differ for later rows.
check_by_row <- function(terms, data, predictors) {
  count <- nrow(data)
  if (count < 10L) {
    return(invisible())
  }
  # The first or the last row may have the smallest value: also without these, and one row alone.
  spread <- function(from, to) unique(round(seq(from, to, length.out = 5L)))
  subsets <- list(spread(1, count), spread(0.3 * count, 0.7 * count), ceiling(0.6 * count))
  terms <- stats::delete.response(terms)
  for (rows in subsets) {
    some <- suppressWarnings(formula_frame(terms, data[rows, , drop = FALSE], "data"))
    is_same <- \(name) has_same_rows(predictors[[name]], rows, some[[name]])
    for (name in Filter(Negate(is_same), names(predictors))) {
      problem <- "`%s` in `formula` depends on all rows: for some of them alone, its values differ."
      abort_input(
        sprintf(problem, name),
        i = "The prediction of a row would depend on the other rows.",
        i = "Compute the column first, or use `scale()`, `poly()` or a recipe: the fit stores it."
      )
    }
  }
}

has_same_rows <- function(whole, rows, some) {
  whole <- if (is.matrix(whole)) whole[rows, , drop = FALSE] else whole[rows]
  if (is.factor(whole) || is.character(whole)) {
    return(identical(as.character(whole), as.character(some)))
  }
  isTRUE(all.equal(as.double(whole), as.double(some), tolerance = 1e-6))
}

# Variables that are not columns are looked up in the session for each prediction.
inform_variables <- function(names) {
  names <- Filter(function(name) !exists(name, envir = baseenv(), inherits = FALSE), names)
  if (length(names)) {
    shown <- toString(sprintf("`%s`", names))
    rlang::inform(c(
      sprintf("`formula` uses %s of this session, which the fit does not store.", shown),
      i = "Predictions will use its value at that time. Write the value itself into the formula."
    ))
  }
}

# model.matrix() would use a date as a number of days, which may not be meant.
check_predictors <- function(predictors) {
  for (name in names(predictors)) {
    check_not_labelled(predictors[[name]], name, "formula")
  }
  is_time <- vapply(predictors, inherits, NA, c("Date", "POSIXt", "difftime"))
  if (any(is_time)) {
    name <- names(predictors)[is_time][[1L]]
    problem <- sprintf("`%s` of `formula` is of class %s.", name, class(predictors[[name]])[[1L]])
    advice <- sprintf("Write `as.numeric(%s)` to use the days or seconds as numbers.", name)
    abort_input(problem, i = advice)
  }
}

formula_frame <- function(terms, data, arg) {
  tryCatch(stats::model.frame(terms, data, na.action = stats::na.pass), error = function(error) {
    abort_input(sprintf("The formula cannot be applied to `%s`.", arg), x = conditionMessage(error))
  })
}

apply_formula <- function(preparation, data, arg, with_label, keeps_missing) {
  terms <- preparation$terms
  if (!with_label) {
    terms <- stats::delete.response(terms)
  }
  frame <- formula_frame(terms, data, arg)
  for (name in names(preparation$levels)) {
    values <- preparation$levels[[name]]
    codes <- if (keeps_missing) {
      match_values(frame[[name]], values) - 1L
    } else {
      category_codes(frame, name, values, arg)
    }
    frame[[name]] <- factor(codes, seq_along(values) - 1L, values)
  }
  is_flag <- vapply(frame, is.logical, NA)
  frame[is_flag] <- lapply(frame[is_flag], as.integer)
  contrasts <- null_if_empty(lapply(preparation$levels, one_hot_contrasts))
  matrix <- stats::model.matrix(stats::delete.response(terms), frame, contrasts.arg = contrasts)
  columns <- setdiff(colnames(matrix), "(Intercept)")
  rows <- as.data.frame(matrix[, columns, drop = FALSE], optional = TRUE)
  if (with_label) {
    rows[[preparation$label]] <- stats::model.response(frame)
  }
  rows
}

# Contrasts with a column for each level, named like all one-hot columns.
one_hot_contrasts <- function(values) {
  size <- length(values)
  matrix(diag(size), size, dimnames = list(values, paste0("_", values)))
}
