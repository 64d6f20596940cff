# Checks of the data of barrier_train() against some of its other arguments.

check_validation_split <- function(split, data, validation, call = caller_env()) {
  if (split == 0) {
    return(invisible())
  }
  if (!is.null(validation)) {
    abort_input(
      "`validation_split` and `validation_data` cannot be used together.",
      i = "Use one of them.",
      call = call
    )
  }
  source <- switch(data$kind, table = "a Spark table", path = "files", "function" = "a function")
  if (!is.null(source)) {
    advice <- if (data$kind == "table") {
      "Split it with `sparklyr::sdf_random_split()`, and pass the second part as `validation_data`."
    } else {
      "Pass the rows to validate on as `validation_data`."
    }
    abort_input(
      sprintf("`validation_split` needs arrays or a data frame, and `data` is %s.", source),
      i = advice,
      call = call
    )
  }
}

check_shuffled <- function(data, shuffle, call = caller_env()) {
  if (!identical(shuffle, "global")) {
    return(invisible())
  }
  if (data$kind == "function") {
    abort_input(
      "`shuffle = \"global\"` cannot reorder the batches of the `data` function.",
      i = "Shuffle in the function, with `dataset$shuffle()`.",
      call = call
    )
  }
  if (data$kind == "table") {
    abort_input(
      "`shuffle = \"global\"` needs all rows in every worker, and `data` is a Spark table.",
      i = "Use `shuffle = TRUE`: Spark spreads the rows over the workers at random anyway.",
      call = call
    )
  }
}
