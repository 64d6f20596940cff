# Data frames: one column is the label, the others together the matrix of features.

check_frame <- function(data, label, features, arg, call) {
  check_columns(label, names(data), arg, "the `label`", call)
  if (!is.null(features)) {
    check_columns(features, names(data), arg, "one of the `features`", call)
  }
  features <- features %||% setdiff(names(data), label)
  check_feature_names(features, label, arg, call)
  if (nrow(data) == 0L) {
    abort_input(sprintf("`%s` has no rows.", arg), call = call)
  }
  check_frame_features(data, features, arg, call)
  check_array(data[[label]], sprintf("%s$%s", arg, label), call, label = TRUE)
  features
}

check_columns <- function(wanted, columns, arg, what, call) {
  absent <- setdiff(wanted, columns)
  if (length(absent)) {
    abort_input(
      c(
        sprintf("`%s` has no column \"%s\", which is %s.", arg, absent[[1L]], what),
        i = sprintf("Its columns are %s.", list_names(columns))
      ),
      call = call
    )
  }
}

check_feature_names <- function(features, label, arg, call) {
  if (length(features) == 0L) {
    abort_input(
      sprintf("`%s` has no column other than the label \"%s\".", arg, label),
      call = call
    )
  }
  if (label %in% features) {
    abort_input(
      sprintf("`features` contains \"%s\", which is the label.", label),
      call = call
    )
  }
}

check_frame_features <- function(
  data,
  features,
  arg,
  call,
  or_else = "name the features to use with `features`"
) {
  for (name in features) {
    column <- data[[name]]
    is_number <- (is.numeric(column) && !inherits(column, "integer64")) || is.logical(column)
    if (!is_number) {
      abort_input(
        c(
          sprintf("The feature column \"%s\" of `%s` is %s.", name, arg, column_kind(column)),
          i = "Features must be numeric or logical.",
          i = sprintf("Encode the column as numbers, or %s.", or_else)
        ),
        call = call
      )
    }
    check_column_missing(column, name, arg, call)
  }
}

check_column_missing <- function(column, name, arg, call) {
  if (anyNA(column)) {
    # In a matrix column, elements count down the rows.
    row <- (which(is.na(column))[[1L]] - 1L) %% NROW(column) + 1L
    abort_input(
      c(
        sprintf("Column \"%s\" of `%s` has missing values, first in row %d.", name, arg, row),
        i = "Remove these rows or fill the values in."
      ),
      call = call
    )
  }
}

column_kind <- function(column) {
  if (is.factor(column)) {
    "a factor"
  } else if (is.character(column)) {
    "character"
  } else {
    sprintf("of class %s", class(column)[[1L]])
  }
}

frame_matrix <- function(data, features) {
  matrix <- as.matrix(as.data.frame(data)[features])
  storage.mode(matrix) <- "double"
  dimnames(matrix) <- NULL
  matrix
}

list_names <- function(names, most = 10L) {
  more <- if (length(names) > most) sprintf(" and %d more", length(names) - most) else ""
  paste0(toString(sprintf("\"%s\"", utils::head(names, most))), more)
}
