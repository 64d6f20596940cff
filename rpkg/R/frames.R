# Data frames: one column is the label, one may be the weight of the rows, and the others form the
# matrix of features, or one matrix for each input that `features` names.

check_frame <- function(data, columns, arg) {
  check_frame_names(data, arg)
  if (!is.null(columns$preparation)) {
    given <- data
    data <- columns$rows %||% prepare_rows(columns$preparation, given, arg, with_label = TRUE)
    # The preparation does not include the weight.
    if (!is.null(columns$weight) && is.null(data[[columns$weight]])) {
      data[[columns$weight]] <- given[[columns$weight]]
    }
  }
  features <- check_named_columns(columns, names(data), arg)
  if (length(columns$tensors)) {
    abort_input(
      sprintf("`tensors` describes columns of tables and files, but `%s` is a data frame.", arg),
      i = "Pass `list(x, y)` with an array of that shape instead."
    )
  }
  if (nrow(data) == 0L) {
    abort_input(sprintf("`%s` has no rows.", arg), i = "Pass at least one row.")
  }
  coded <- encode_features(data, features, columns, arg)
  y <- frame_label(data, columns, arg)
  of_labels <- if (is.list(y)) levels_of_labels(y, columns$label)
  check_matrix_order(unlist(coded$feature_names), unlist(columns$feature_names), arg)
  coded["categories"] <- list(c(coded$categories, of_labels))
  weight <- columns$weight
  if (!is.null(weight)) {
    check_array(data[[weight]], sprintf("%s$%s", arg, weight))
  }
  c(
    list(kind = "arrays", y = y, sample_weight = if (!is.null(weight)) as.double(data[[weight]])),
    coded,
    list(arguments_used = c("weight", "categories", "encode"))
  )
}

# The model's input from the columns of a data frame, and how it was made.
encode_features <- function(data, features, columns, arg) {
  coded <- encode_frame(data, features, columns, arg)
  check_frame_features(data, features, arg, coded)
  check_finite(data, features, arg)
  list(
    x = frame_inputs(data, features, coded$categories, coded$encode),
    features = features,
    categories = coded$categories,
    encode = coded$encode,
    feature_names = name_features(data, features, coded, arg)
  )
}

# The columns of a matrix within a data frame, such as validation data, are those of the training.
check_matrix_order <- function(names, known, arg) {
  if (setequal(names, known) && !identical(names, known)) {
    first <- which(names != known)[[1L]]
    text <- "`%s` has \"%s\" where the training has \"%s\"."
    problem <- sprintf(text, arg, names[[first]], known[[first]])
    abort_input(problem, i = "Put the columns of its matrix in the order of the training.")
  }
}

# Text becomes a factor of its sorted values, or of those from the training or `categories`.
frame_label <- function(data, columns, arg) {
  if (is.null(columns$label)) {
    return(NULL)
  }
  if (is.list(columns$label)) {
    return(lapply(columns$label, function(label) {
      one <- replace(columns, "label", list(label))
      frame_label(data, replace(one, "levels", list(NULL)), arg)
    }))
  }
  y <- data[[columns$label]]
  at <- sprintf("%s$%s", arg, columns$label)
  check_characters(y, at)
  values <- label_values(columns)
  if (is.null(values) && is.character(y)) {
    check_no_missing(y, at)
    if (is.null(columns$levels) && isFALSE(columns$finds_levels)) {
      abort_unknown_codes(columns$label, y, arg, columns$known_from)
    }
    # Sorted in Python's order, regardless of the locale.
    values <- columns$levels %||% sort(unique(y), method = "radix")
  }
  if (is.null(values)) {
    check_array(y, at, label = TRUE)
    return(as_label(y))
  }
  codes <- category_codes(data, columns$label, values, arg)
  factor(codes, seq_along(values) - 1L, as.character(values), ordered = is.ordered(y))
}

# The levels of each of several labels, used to code later data.
levels_of_labels <- function(y, label) {
  known <- lapply(y, levels)
  known <- known[lengths(known) > 0L]
  rlang::set_names(known, unlist(label)[names(known)])
}

# Reject duplicate names of columns, which are ambiguous.
check_frame_names <- function(data, arg) {
  names <- rlang::names2(data)
  if (!all(nzchar(names))) {
    problem <- sprintf("Column %d of `%s` has no name.", match("", names), arg)
    abort_input(problem, i = "Name it, or leave it out.")
  }
  twice <- names[duplicated(names)]
  if (length(twice)) {
    problem <- sprintf("`%s` has two columns \"%s\".", arg, twice[[1L]])
    abort_input(problem, i = "Rename one, or leave it out.")
  }
}

check_columns <- function(wanted, columns, arg, what) {
  absent <- setdiff(wanted, columns)
  if (length(absent)) {
    abort_input(
      sprintf("`%s` has no column \"%s\", which is %s.", arg, absent[[1L]], what),
      if (what == "the `label`" && identical(absent[[1L]], "label")) {
        c(
          i = "Name the column to predict, e.g. `label = Species`, or use a formula.",
          i = "If the rows have no labels, use `label = NULL`."
        )
      },
      # A name of one or two letters is similar to any other.
      i = if (nchar(absent[[1L]]) > 2L) name_near(absent[[1L]], columns, "\"%s\""),
      i = sprintf("Its columns are %s.", list_names(columns))
    )
  }
}

check_frame_features <- function(
  data,
  features,
  arg,
  coded,
  or_else = "choose other columns with `features`"
) {
  for (name in unlist(features)) {
    column <- data[[name]]
    check_not_labelled(column, name, arg)
    if (!is.null(coded$categories[[name]])) {
      category_codes(data, name, coded$categories[[name]], arg)
      next
    }
    fits <- (is.numeric(column) && !inherits(column, "integer64")) || is.logical(column)
    if (!fits && !remains_text(name, coded$encode)) {
      abort_input(
        sprintf("The feature column \"%s\" of `%s` is %s.", name, arg, column_kind(column)),
        i = if (is.factor(column) || is.character(column)) {
          "It must be numeric or logical here."
        } else {
          "Features are numbers, logical values, text or factors."
        },
        i = sprintf("%s, or %s.", advise_on_column(name, column), or_else)
      )
    }
    check_column_missing(column, name, arg)
  }
}

# Advice on converting a column to numbers.
advise_on_column <- function(name, column) {
  if (inherits(column, "difftime")) {
    sprintf("Use `as.numeric(%s, units = \"mins\")`", name)
  } else if (inherits(column, c("Date", "POSIXt", "integer64"))) {
    sprintf("Use `as.numeric(%s)`", name)
  } else {
    "Encode the column as numbers"
  }
}

# haven's labelled columns have codes of categories: as numbers they would be ordered.
check_not_labelled <- function(column, name, arg) {
  if (inherits(column, "haven_labelled")) {
    advice <- "Use `haven::as_factor(%s)`, or, if the codes are numbers, `as.numeric()`."
    abort_input(
      sprintf("Column \"%s\" of `%s` has codes with labels, of class haven_labelled.", name, arg),
      i = sprintf(advice, name)
    )
  }
}

# One infinite feature makes the loss NaN after a step.
check_finite <- function(data, features, arg) {
  for (name in unlist(features)) {
    column <- data[[name]]
    if (is.double(column) && any(is.infinite(column))) {
      problem <- "Column \"%s\" of `%s` is infinite in row %d."
      problem <- sprintf(problem, name, arg, first_row(is.infinite(column)))
      abort_input(problem, i = "Remove these rows, or replace the values.")
    }
  }
}

check_column_missing <- function(column, name, arg) {
  if (anyNA(column)) {
    problem <- "Column \"%s\" of `%s` has missing values, first in row %d."
    problem <- sprintf(problem, name, arg, first_row(is.na(column)))
    abort_input(problem, i = "Remove these rows, or fill in the values.")
  }
}

# In a matrix column, the index of an element runs down the rows.
first_row <- function(bad) (which(bad)[[1L]] - 1L) %% NROW(bad) + 1L

column_kind <- function(column) {
  if (is.factor(column)) {
    "a factor"
  } else if (is.character(column)) {
    "character"
  } else {
    sprintf("of class %s", class(column)[[1L]])
  }
}

# The model's input: one matrix of doubles, or one for each named input, in which whole numbers
# remain integers, as those of tables do.
frame_inputs <- function(data, features, categories = NULL, encode = NULL) {
  if (!is.list(features)) {
    return(frame_matrix(data, features, categories, encode))
  }
  lapply(features, function(group) {
    matrix <- frame_matrix(data, group, categories, encode)
    is_whole <- function(name) {
      !is.null(categories[[name]]) || typeof(data[[name]]) %in% c("integer", "logical")
    }
    if (is.numeric(matrix) && all(vapply(group, is_whole, NA))) {
      storage.mode(matrix) <- "integer"
    }
    matrix
  })
}

frame_matrix <- function(data, features, categories = NULL, encode = NULL) {
  if (remains_text(features[[1L]], encode)) {
    return(matrix(as.character(data[[features]])))
  }
  columns <- lapply(features, function(name) {
    values <- categories[[name]]
    if (is.null(values)) {
      return(as.matrix(data[[name]]))
    }
    # Codes start at 0.
    codes <- match_values(data[[name]], values)
    if (is_one_hot(name, encode)) outer(codes, seq_along(values), `==`) else as.matrix(codes - 1L)
  })
  matrix <- do.call(cbind, columns)
  storage.mode(matrix) <- "double"
  dimnames(matrix) <- NULL
  matrix
}

# TRUE for each row that has a value, and a known category, in every feature column.
complete_cases <- function(data, features, categories) {
  is_complete <- function(name) {
    column <- data[[name]]
    if (is.list(column)) {
      # A list column is rejected later because of its type.
      return(TRUE)
    }
    has_value <- complete_rows(column)
    if (is.null(values <- categories[[name]])) {
      return(has_value)
    }
    is_known <- !is.na(match_values(column, values))
    if (any(has_value) && !any(is_known)) {
      warn_of_other_values(name, column[has_value][[1L]], values)
    }
    has_value & is_known
  }
  Reduce(`&`, lapply(unlist(features), is_complete), rep(TRUE, nrow(data)))
}

warn_of_other_values <- function(name, value, values) {
  value <- encodeString(as.character(value), quote = "\"")
  is_not <- sprintf("is one of its categories (e.g. %s): no row gets a prediction.", value)
  rlang::warn(c(
    sprintf("No value of column \"%s\" %s", name, is_not),
    i = sprintf("The categories are %s.", list_names(as.character(values)))
  ))
}

# The positions, from 0, of a column's values among its categories.
category_codes <- function(data, name, values, arg) {
  column <- data[[name]]
  check_column_missing(column, name, arg)
  codes <- match_values(column, values) - 1L
  if (anyNA(codes)) {
    row <- which(is.na(codes))[[1L]]
    problem <- "Column \"%s\" of `%s` contains %s in row %d, which is not one of its categories."
    abort_input(
      sprintf(problem, name, arg, encodeString(as.character(column[[row]]), quote = "\""), row),
      i = sprintf("The categories are %s.", list_names(as.character(values)))
    )
  }
  codes
}

match_values <- function(column, values) {
  are_numbers <- is.numeric(column) && is.numeric(values)
  if (are_numbers) match(column, values) else match(as.character(column), as.character(values))
}

list_names <- function(names, most = 10L) {
  # One more name is as short as "and 1 more".
  most <- if (length(names) == most + 1L) most + 1L else most
  more <- if (length(names) > most) sprintf(" and %d more", length(names) - most)
  paste0(toString(sprintf("\"%s\"", utils::head(names, most))), more)
}
