#' @keywords internal
#' @importFrom rlang %||% .data abort caller_arg caller_env
# Of a package whose version matters a function is imported: otherwise R checks no version.
"_PACKAGE"
