#' @keywords internal
#' @importFrom reticulate py_available
#' @importFrom rlang %||% .data abort caller_arg caller_env
# Of a package whose version matters at least one function is imported: R checks no version otherwise.
"_PACKAGE"
