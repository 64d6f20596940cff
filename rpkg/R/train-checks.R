# Checks of the data of barrier_train() against some of its other arguments.

check_validation_split <- function(split, data, validation) {
  if (split == 0) {
    return(invisible())
  }
  if (!is.null(validation)) {
    problem <- "`validation_split` and `validation_data` cannot be used together."
    abort_input(problem, i = "Use one of them.")
  }
  source <- switch(data$kind, table = "a Spark table", path = "files", "function" = "a function")
  if (!is.null(source)) {
    advice <- if (data$kind == "table") {
      "Split it with `sparklyr::sdf_random_split()`, and pass the second part as `validation_data`."
    } else {
      "Pass the rows to validate on as `validation_data`."
    }
    problem <- sprintf("`validation_split` needs arrays or a data frame, and `data` is %s.", source)
    abort_input(problem, i = advice)
  }
}

check_shuffled <- function(data, shuffle) {
  if (!identical(shuffle, "global")) {
    return(invisible())
  }
  if (data$kind == "function") {
    problem <- "`shuffle = \"global\"` cannot reorder the batches of the `data` function."
    abort_input(problem, i = "Shuffle in the function, with `dataset$shuffle()`.")
  }
  if (data$kind == "table") {
    problem <- "`shuffle = \"global\"` needs all rows in every worker, and `data` is a Spark table."
    advice <- "Use `shuffle = TRUE`: Spark spreads the rows over the workers at random anyway."
    abort_input(problem, i = advice)
  }
}

# `class_weight` with codes of the label as names.
class_weight_codes <- function(weights, data) {
  if (is.null(weights)) {
    return(NULL)
  }
  if (identical(data$kind, "function")) {
    problem <- "`class_weight` needs labels that are known in advance, but `data` is a function."
    abort_input(problem, i = "Return batches of `(x, y, sample_weight)` from it instead.")
  }
  if (!is.null(data$sample_weight) || !is.null(data$weight)) {
    problem <- "`class_weight` cannot be used together with row weights in `data`."
    abort_input(problem, i = "Multiply the two into one weight for each row.")
  }
  if (is_python(weights)) {
    return(weights)
  }
  classes <- names(weights)
  # Python finds the levels of other data.
  if (!isTRUE(data$kind %in% c("python", "table", "path"))) {
    classes <- class_codes(classes, label_levels(data))
  }
  rlang::set_names(as.list(as.double(unlist(weights))), classes)
}

class_codes <- function(classes, levels) {
  is_code <- grepl("^[0-9]{1,9}$", classes)
  if (!is.null(levels) && all(classes %in% levels)) {
    codes <- match(classes, levels) - 1L
  } else {
    codes <- suppressWarnings(as.integer(classes))
    unknown <- which(!is_code | codes >= if (is.null(levels)) Inf else length(levels))
    # If some names are levels, report one that is not.
    strange <- setdiff(unknown, which(classes %in% levels))
    if (length(unknown)) {
      abort_class(classes[[c(strange, unknown)[[1L]]]], levels)
    }
  }
  if (anyDuplicated(codes)) {
    twice <- classes[[anyDuplicated(codes)]]
    problem <- sprintf("`class_weight` has the class \"%s\" twice.", twice)
    abort_input(problem, i = "Give each class one weight.")
  }
  format(codes, trim = TRUE, scientific = FALSE)
}

abort_class <- function(class, levels) {
  expected <- if (is.null(levels)) {
    "Classes are whole numbers: \"0\", \"1\", ..., unless `categories` lists the label's values."
  } else {
    sprintf("The levels of the label are %s.", list_names(levels))
  }
  problem <- sprintf("`class_weight` has \"%s\", which is not a class of the label.", class)
  abort_input(problem, i = expected)
}
