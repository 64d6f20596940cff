# The computations of a formula or a recipe as SQL: expressions that dbplyr translates.

# A query of the rows of a table or query, with the key and the columns of the model's input:
# `.feature_1`, `.feature_2`, ...
prepare_query <- function(rows, key, fit) {
  check_installed(c("dplyr", "dbplyr"), "A formula or a recipe in SQL")
  preparation <- fit$preparation
  is_recipe <- inherits(preparation, "tfdist_recipe")
  features <- fit$features
  expressions <- as_sql_expressions(fit)
  names <- rlang::set_names(sprintf(".feature_%d", seq_along(features)), features)
  made <- features
  if (!is_recipe) {
    # Not all databases accept a name such as `I(a^2)`.
    names(expressions) <- made <- unname(names)
  }
  prepare <- function(rows, key) {
    kept <- rlang::set_names(rlang::syms(key), sprintf(".key_%d", seq_along(key)))
    rows <- dplyr::mutate(dplyr::ungroup(rows), !!!kept)
    rows <- dplyr::mutate(rows, !!!expressions)
    shown <- c(
      rlang::set_names(rlang::syms(names(kept)), key),
      rlang::set_names(rlang::syms(made), names)
    )
    dplyr::select(rows, !!!shown)
  }
  used <- if (is_recipe) list_predictors(preparation$recipe) else preparation$variables
  check_columns(key, colnames(rows), "table", "the `key`")
  check_columns(used, colnames(rows), "table", "a feature of the training")
  found <- dplyr::collect(prepare(utils::head(rows, 50L), used))
  check_prepared(as.data.frame(found), used, names, fit)
  list(sql = as.character(dbplyr::remote_query(prepare(rows, key))), features = names)
}

# In the order of their computation; each may use those before it.
as_sql_expressions <- function(fit) {
  preparation <- fit$preparation
  if (inherits(preparation, "tfdist_recipe")) {
    return(recipe_expressions(preparation$recipe))
  }
  expressions <- formula_expressions(preparation)
  if (!identical(names(expressions), as.character(fit$features))) {
    problem <- "The formula's columns cannot be computed in SQL."
    abort_input(problem, i = "Compute them in the database, and pass their names as `features`.")
  }
  expressions
}

# Columns of the data from which a recipe computes the features.
list_predictors <- function(recipe) recipe$var_info$variable[recipe$var_info$role %in% "predictor"]

recipe_expressions <- function(recipe) {
  check_installed("orbital", "A recipe in SQL")
  translated <- or_abort(
    orbital::orbital_inline(orbital::orbital(recipe)),
    "The recipe cannot be translated to SQL.",
    i = "Compute its columns in the database, and pass their names as `features`."
  )
  c(known_levels(recipe), translated)
}

# A value that was not in the training becomes missing, unless a step handles it.
known_levels <- function(recipe) {
  steps <- Filter(function(step) inherits(step, c("step_novel", "step_other")), recipe$steps)
  handled <- unlist(lapply(steps, function(step) names(step$objects)))
  levels <- lapply(recipe$orig_lvls, function(known) known$values)
  is_used <- names(levels) %in% setdiff(list_predictors(recipe), handled)
  levels <- levels[is_used & vapply(levels, is.character, NA)]
  lapply(rlang::set_names(names(levels)), function(name) {
    rlang::expr(dplyr::if_else(!!rlang::sym(name) %in% !!levels[[name]], !!rlang::sym(name), NA))
  })
}

# The columns of model.matrix(), by their names: products of what the variables of a term become.
formula_expressions <- function(preparation) {
  terms <- stats::delete.response(preparation$terms)
  variables <- as.list(attr(terms, "predvars"))[-1L]
  labels <- rownames(attr(terms, "factors"))
  columns_of <- \(expr, label) variable_columns(expr, label, preparation$levels[[label]])
  parts <- Map(columns_of, variables, labels)
  names(parts) <- labels
  columns <- lapply(colnames(attr(terms, "factors")), function(term) {
    Reduce(cross_columns, parts[attr(terms, "factors")[, term] > 0L])
  })
  do.call(c, unname(columns))
}

# The first varies fastest.
cross_columns <- function(left, right) {
  pairs <- expand.grid(left = names(left), right = names(right), stringsAsFactors = FALSE)
  multiply <- function(first, second) rlang::expr((!!left[[first]]) * (!!right[[second]]))
  rlang::set_names(
    Map(multiply, pairs$left, pairs$right),
    paste(pairs$left, pairs$right, sep = ":")
  )
}

variable_columns <- function(expr, label, levels) {
  if (is.null(levels)) {
    value <- if (is_condition(expr)) {
      rlang::expr(dplyr::if_else(!!as_sql_call(expr), 1, 0))
    } else {
      as_sql_number(expr)
    }
    return(rlang::set_names(list(value), label))
  }
  if (is_condition(expr)) {
    condition <- as_sql_call(expr)
    columns <- rlang::exprs(
      dplyr::if_else(!!condition, 0, 1),
      dplyr::if_else(!!condition, 1, 0)
    )
    return(rlang::set_names(columns, paste0(label, "_", levels)))
  }
  is_factor <- rlang::is_call(expr, c("factor", "as.factor", "as.character"), n = 1L)
  column <- if (is_factor) expr[[2L]] else expr
  if (!is.symbol(column)) {
    abort_not_sql(expr)
  }
  numbers <- suppressWarnings(as.numeric(levels))
  values <- if (is_factor && !anyNA(numbers)) numbers else levels
  columns <- lapply(values, function(value) {
    is_value <- rlang::expr(dplyr::if_else(!!column == !!value, 1, 0))
    # NULL for other values, too.
    rlang::expr(dplyr::if_else(!!column %in% !!values, !!is_value, NA))
  })
  rlang::set_names(columns, paste0(label, "_", levels))
}

comparisons <- c("==", "!=", "<", "<=", ">", ">=", "&", "|", "!", "%in%", "is.na")
sql_functions <- c("+", "-", "*", "(", "exp", "abs", "floor", "ceiling", "pmin", "pmax")

is_condition <- function(expr) {
  rlang::is_call(expr, c("I", "("), n = 1L) &&
    is_condition(expr[[2L]]) ||
    rlang::is_call(expr, comparisons)
}

# An expression of R whose value is a number. Columns are made doubles: databases divide whole
# numbers as such, and add beyond the largest.
as_sql_number <- function(expr) {
  if (is.numeric(expr) && length(expr) == 1L) {
    return(as.double(expr))
  }
  if (is.symbol(expr)) {
    return(rlang::expr(as.double(!!expr)))
  }
  if (!is.call(expr)) {
    abort_not_sql(expr)
  }
  if (is_condition(expr)) {
    return(rlang::expr(dplyr::if_else(!!as_sql_call(expr), 1, 0)))
  }
  special <- as_special_number(expr)
  if (!is.null(special)) {
    return(special)
  }
  if (!rlang::is_call(expr, sql_functions) || any(nzchar(rlang::names2(as.list(expr))))) {
    abort_not_sql(expr)
  }
  as.call(c(expr[[1L]], lapply(as.list(expr)[-1L], as_sql_number)))
}

# Functions that databases compute differently from R, or not at all. Rows for which R has no finite
# number have none there.
as_special_number <- function(expr) {
  if (!is.symbol(expr[[1L]])) {
    return(NULL)
  }
  name <- as.character(expr[[1L]])
  args <- as.list(expr)[-1L]
  number <- function(place) as_sql_number(args[[place]])
  where <- function(condition, value) rlang::expr(dplyr::if_else(!!condition, !!value, NA))
  logarithm <- function(x, base = 1) {
    value <- rlang::expr(log(!!x))
    where(rlang::expr(!!x > 0), if (base == 1) value else rlang::expr(!!value / !!log(base)))
  }
  switch(
    paste0(name, "/", length(args)),
    "I/1" = ,
    "as.numeric/1" = ,
    "as.double/1" = number(1L),
    "log/1" = logarithm(number(1L)),
    "log2/1" = logarithm(number(1L), 2),
    "log10/1" = logarithm(number(1L), 10),
    "log1p/1" = logarithm(rlang::expr((1 + !!number(1L)))),
    "sqrt/1" = where(rlang::expr(!!number(1L) >= 0), rlang::expr(sqrt(!!number(1L)))),
    "//2" = as_quotient(number(1L), number(2L), where),
    "^/2" = as_power(args, number),
    "scale/3" = as_scaled(expr),
    "ifelse/3" = rlang::expr(dplyr::if_else(!!as_sql_call(args[[1L]]), !!number(2L), !!number(3L)))
  )
}

as_quotient <- function(above, below, where) {
  quotient <- rlang::expr((!!above) / (!!below))
  if (is.numeric(below) && below != 0) quotient else where(rlang::expr(!!below != 0), quotient)
}

as_power <- function(args, number) {
  power <- args[[2L]]
  if (!is.numeric(power) || power < 1 || power != round(power) || power > 8) {
    abort_not_sql(rlang::call2("^", !!!args))
  }
  Reduce(function(left, right) rlang::expr((!!left) * (!!right)), rep(list(number(1L)), power))
}

# As model.frame() stores it for later rows, with the training's numbers.
as_scaled <- function(expr) {
  args <- as.list(match.call(scale, expr))
  center <- eval(args$center, baseenv())
  scale <- eval(args$scale, baseenv())
  center <- if (isFALSE(center)) 0 else as.double(center)
  scale <- if (isFALSE(scale)) 1 else as.double(scale)
  rlang::expr((!!as_sql_number(args$x) - !!center) / !!scale)
}

# A condition, in which text and numbers are compared unchanged.
as_sql_call <- function(expr) {
  if (rlang::is_call(expr, c("I", "("), n = 1L)) {
    return(rlang::expr((!!as_sql_call(expr[[2L]]))))
  }
  if (!rlang::is_call(expr, comparisons)) {
    abort_not_sql(expr)
  }
  is_joined <- rlang::is_call(expr, c("&", "|", "!"))
  inner <- lapply(as.list(expr)[-1L], function(part) {
    if (is_joined) {
      as_sql_call(part)
    } else if (is.symbol(part) || is.character(part) || is.numeric(part) || is.logical(part)) {
      part
    } else if (rlang::is_call(part, "c") && all(vapply(as.list(part)[-1L], is.atomic, NA))) {
      eval(part, baseenv())
    } else {
      as_sql_number(part)
    }
  })
  as.call(c(expr[[1L]], inner))
}

abort_not_sql <- function(expr) {
  # Without the numbers that the training has fixed.
  shown <- sub(", (coefs|knots|Boundary.knots|intercept) = .*$", ")", deparse_line(expr))
  advice <- "Compute its column in the database, and pass the columns' names as `features`."
  abort_input(sprintf("`%s` of the formula cannot be translated to SQL.", shown), i = advice)
}

# Check on some rows of the database that it computes the same as R.
check_prepared <- function(rows, used, names, fit) {
  if (!nrow(rows)) {
    return(invisible())
  }
  given <- rows[used]
  # A recipe warns of levels that the training did not have.
  expected <- suppressWarnings(prepare_rows(fit$preparation, given, "table", keeps_missing = TRUE))
  for (feature in names(names)) {
    wanted <- expected[[feature]]
    got <- rows[[names[[feature]]]]
    is_text <- is.factor(wanted) || is.character(wanted)
    same <- if (is_text) {
      as.character(wanted) == as.character(got)
    } else {
      abs(finite(wanted) - finite(got)) <= 1e-5 * pmax(1, abs(finite(wanted)))
    }
    missing <- is.na(if (is_text) wanted else finite(wanted))
    also <- is.na(if (is_text) got else finite(got))
    bad <- which(missing != also | (!missing & !also & !same))
    if (length(bad)) {
      row <- bad[[1L]]
      shown <- function(values) format(values[[row]], digits = 6L)
      problem <- "The database computes %s for the feature \"%s\" where R computes %s."
      abort_input(
        sprintf(problem, shown(got), feature, shown(wanted)),
        x = sprintf("The row has %s.", describe_values(given[row, , drop = FALSE])),
        i = "Compute the column in the database, and pass the columns' names as `features`."
      )
    }
  }
}

finite <- function(x) {
  x <- as.double(x)
  replace(x, !is.finite(x), NA)
}

describe_values <- function(row) {
  toString(sprintf("%s = %s", names(row), vapply(row, function(x) format(x[[1L]]), "")))
}
