# Kubernetes's rules for names, labels and quantities, which Python checks, too.

check_word <- function(x, allow_null = TRUE, arg = caller_arg(x), call = caller_env()) {
  check_pattern(x, "^[^[:cntrl:][:space:]]+$", "text without spaces", allow_null, arg, call)
}

# A namespace is one label of a DNS name; names of other objects may have several.
check_kubernetes_name <- function(
  x,
  one_label = FALSE,
  arg = caller_arg(x),
  call = caller_env()
) {
  characters <- if (one_label) "-a-z0-9" else "-a-z0-9."
  most <- if (one_label) 63L else 253L
  expected <- sprintf(
    "a name of at most %d characters (a-z, 0-9, \"-\"%s)",
    most,
    if (one_label) "" else ", \".\""
  )
  check_pattern(x, sprintf("^[a-z0-9]([%s]*[a-z0-9])?$", characters), expected, TRUE, arg, call)
  if (!is.null(x) && nchar(x) > most) {
    abort_expected(x, expected, TRUE, arg, call)
  }
  invisible(x)
}

check_kubernetes_names <- function(x, arg = caller_arg(x), call = caller_env()) {
  check_strings(x, allow_null = TRUE, arg = arg, call = call)
  for (name in x) {
    check_kubernetes_name(name, arg = arg, call = call)
  }
  invisible(x)
}

quantity <- "^[+]?([0-9]+([.][0-9]*)?|[.][0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"

check_cpu_quantity <- function(x, arg = caller_arg(x), call = caller_env()) {
  is_amount <- is_number(x) && is.finite(x) && x > 0
  is_text <- rlang::is_string(x) && grepl(quantity, x) && grepl("[1-9]", x)
  if (!is.null(x) && !is_amount && !is_text) {
    abort_expected(x, "a number of cores such as 4, 0.5 or \"500m\"", TRUE, arg, call)
  }
  invisible(x)
}

check_memory_quantity <- function(x, arg = caller_arg(x), call = caller_env()) {
  is_text <- rlang::is_string(x) && grepl(quantity, x) && grepl("[1-9]", x)
  if (!is.null(x) && (!is_text || grepl("^[0-9.]+[mun]?$", x))) {
    abort_expected(x, "an amount with its unit such as \"8Gi\" or \"500M\"", TRUE, arg, call)
  }
  invisible(x)
}

check_labels <- function(x, arg = caller_arg(x), call = caller_env()) {
  found <- check_variables(x, arg = arg, call = call)
  word <- "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
  keys <- grepl(sprintf("^([a-z0-9][-a-z0-9.]*/)?%s$", word), names(found))
  wrong <- which(!keys | !grepl(sprintf("^(%s)?$", word), found))
  if (length(wrong) > 0L) {
    label <- sprintf("%s=%s", names(found)[[wrong[[1L]]]], found[[wrong[[1L]]]])
    abort_input(
      c(
        sprintf("`%s` has %s, which is not a Kubernetes label.", arg, describe(label)),
        i = "Name and value are at most 63 letters, digits, \"-\", \"_\" and \".\" each."
      ),
      call = call
    )
  }
  invisible(found)
}

check_tolerations <- function(x, arg = caller_arg(x), call = caller_env()) {
  known <- c("key", "operator", "value", "effect", "tolerationSeconds")
  is_one <- function(one) is.list(one) && length(one) > 0L && all(rlang::names2(one) %in% known)
  if (!is.null(x) && !is_one(x) && !(is.list(x) && all(vapply(x, is_one, NA)))) {
    expected <- "a list such as `list(list(key = \"gpu\", operator = \"Exists\"))`"
    abort_expected(x, expected, TRUE, arg, call)
  }
  invisible(x)
}
