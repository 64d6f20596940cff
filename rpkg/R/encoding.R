# Factors, text and whole numbers of data frames as codes, one-hot or unchanged text ("text").
# Python does the same for tables and files (pybackend/core/data/columns.py).

# A column with more values is probably an identifier.
most_one_hot <- 1000L

# Categories and encodings of the encoded feature columns: those that were passed or are known from
# a training run, and those found in the data.
encode_frame <- function(data, features, columns, arg) {
  texts <- list_text_columns(features, columns$text_inputs)
  features <- unique(unlist(features))
  for (name in features) {
    check_characters(data[[name]], sprintf("%s$%s", arg, name))
  }
  unused <- setdiff(names(columns$encode), features)
  if (length(unused)) {
    abort_input(sprintf("`encode` has \"%s\", which is not a feature.", unused[[1L]]))
  }
  categories <- columns$categories
  encode <- list()
  for (name in features) {
    encoding <- choose_encoding(name, data[[name]], columns, name %in% texts)
    if (is.null(encoding)) {
      next
    }
    encode[[name]] <- encoding
    if (encoding != "text" && is.null(categories[[name]])) {
      categories[[name]] <- find_values(data[[name]], name, encoding, columns, arg)
    }
  }
  list(categories = categories, encode = null_if_empty(encode))
}

# Columns that form a text input by themselves.
list_text_columns <- function(features, inputs) {
  groups <- as_groups(features)
  is_named <- names(groups) %in% inputs
  is_text <- if (length(groups) == 1L) length(inputs) > 0L else is_named
  alone <- unlist(groups[lengths(groups) == 1L & is_text])
  setdiff(alone, unlist(groups[lengths(groups) > 1L]))
}

choose_encoding <- function(name, column, columns, is_text_input) {
  has_categories <- !is.null(columns$categories[[name]])
  is_text <- is.factor(column) || is.character(column)
  asked <- if (!is.null(names(columns$encode))) {
    as.list(columns$encode)[[name]]
  } else if (is_text || has_categories) {
    columns$encode
  }
  asked %||%
    if (has_categories) {
      "integer"
    } else if (is_text) {
      if (is_text_input && is.character(column)) "text" else "one_hot"
    }
}

find_values <- function(column, name, encoding, columns, arg) {
  if (isFALSE(columns$finds_levels)) {
    abort_unknown_codes(name, column, arg, columns$known_from)
  }
  is_whole <- is.numeric(column) && rlang::is_integerish(column)
  if (!is.factor(column) && !is.character(column) && !is_whole) {
    problem <- sprintf("`encode` has \"%s\", which is %s.", name, column_kind(column))
    advice <- "Text, factors and whole numbers can be encoded; other types need `categories`."
    abort_input(problem, i = advice)
  }
  check_column_missing(column, name, arg)
  values <- column_values(column)
  if (encoding == "one_hot" && length(values) > most_one_hot) {
    advice <- "Leave it out, or use `data_options(encode = c(%s = \"integer\"))` and an embedding."
    problem <- "Column \"%s\" of `%s` has %d values, too many to encode as \"one_hot\"."
    abort_input(sprintf(problem, name, arg, length(values)), i = sprintf(advice, name))
  }
  values
}

# `known_from` names what fixed the types of the columns, or is NULL.
abort_unknown_codes <- function(name, column, arg, known_from) {
  problem <- sprintf("Column \"%s\" of `%s` is %s.", name, arg, column_kind(column))
  if (!is.null(known_from)) {
    abort_input(problem, i = sprintf("It was numeric in %s.", known_from))
  }
  abort_input(
    problem,
    i = "The codes of its values come from the training and are not known here.",
    i = sprintf("Use the fit, or `data_options(categories = list(%s = ...))`.", name)
  )
}

# The levels of a factor, or the sorted values, in Python's order regardless of the locale.
column_values <- function(column) {
  levels(column) %||% as_comparable_values(sort(unique(column), method = "radix"))
}

is_one_hot <- function(name, encode) identical(as.list(encode)[[name]], "one_hot")

remains_text <- function(name, encode) identical(as.list(encode)[[name]], "text")

# Names of the numbers of each input, in their order: `column_value` if one-hot.
name_numbers <- function(data, features, categories, encode) {
  if (is.list(features)) {
    return(lapply(features, function(group) name_numbers(data, group, categories, encode)))
  }
  unlist(lapply(features, function(name) {
    if (is_one_hot(name, encode)) {
      paste0(name, "_", categories[[name]])
    } else if (is.null(categories[[name]]) && NCOL(data[[name]]) > 1L) {
      paste0(name, "_", colnames(data[[name]]) %||% seq_len(NCOL(data[[name]])))
    } else {
      name
    }
  }))
}

name_features <- function(data, features, coded, arg) {
  names <- name_numbers(data, features, coded$categories, coded$encode)
  twice <- Filter(length, lapply(as_groups(names), function(one) one[duplicated(one)]))
  if (length(twice)) {
    abort_input(
      sprintf("Two features of `%s` are called \"%s\".", arg, twice[[1L]][[1L]]),
      i = "A factor or text has a column `column_level` for each level: rename the other column."
    )
  }
  names
}

as_groups <- function(features) if (is.list(features)) features else list(features)

# The columns with the codes and levels of the training data, for validation and later data.
narrow_columns <- function(columns, data) {
  columns$features <- data$features %||% columns$features
  columns$feature_names <- data$feature_names %||% columns$feature_names
  columns$levels <- label_levels(data) %||% columns$levels
  columns$categories <- data$categories %||% columns$categories
  columns$encode <- data$encode %||% columns$encode
  columns$finds_levels <- FALSE
  columns$known_from <- if (!is.null(data$features)) "`data`"
  columns$rows <- NULL
  columns
}

# Check before any worker starts that the model takes as many numbers per row as the features have.
check_inputs <- function(model, names) {
  if (!is.null(names)) call_bridge("check_inputs", model, as_python_features(names))
}
