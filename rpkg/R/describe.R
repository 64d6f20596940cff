# Description of an unexpected value for an error: "the string \"two\"", "a list of 3".
describe <- function(x) {
  if (missing(x)) {
    return("missing")
  }
  if (is.null(x)) {
    return("`NULL`")
  }
  if (is_python(x)) {
    return(sprintf("a Python object of class %s", class(x)[[1L]]))
  }
  if (is.function(x)) {
    return("a function")
  }
  if (is.object(x) || !is.atomic(x) || !is.null(dim(x))) {
    return(describe_object(x))
  }
  if (length(x) == 1L) describe_scalar(x) else describe_vector(x)
}

describe_object <- function(x) {
  if (is.data.frame(x)) {
    sprintf("a data frame of %s", format_count(nrow(x), "row"))
  } else if (is.object(x)) {
    sprintf("an object of class %s", class(x)[[1L]])
  } else if (is.list(x)) {
    sprintf("a list of %d", length(x))
  } else if (!is.null(dim(x))) {
    kind <- if (is.numeric(x)) "an array" else sprintf("an array of type %s", typeof(x))
    sprintf("%s, %s", kind, paste(dim(x), collapse = " x "))
  } else {
    sprintf("an object of type %s", typeof(x))
  }
}

describe_scalar <- function(x) {
  if (is.na(x) && !is.nan(x)) {
    "`NA`"
  } else if (is.character(x)) {
    sprintf("the string %s", encodeString(shorten(x), quote = "\""))
  } else if (is.logical(x)) {
    sprintf("`%s`", x)
  } else if (is.numeric(x)) {
    sprintf("the number %s", format(x, digits = 15, decimal.mark = "."))
  } else {
    sprintf("a value of type %s", typeof(x))
  }
}

describe_vector <- function(x) {
  kind <- switch(
    typeof(x),
    character = "strings",
    double = ,
    integer = "numbers",
    logical = "logical values",
    sprintf("values of type %s", typeof(x))
  )
  sprintf("a vector of %d %s", length(x), kind)
}

shorten <- function(x, width = 60L) {
  if (nchar(x) > width) paste0(substr(x, 1L, width), "...") else x
}
