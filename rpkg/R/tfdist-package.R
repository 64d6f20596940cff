#' @keywords internal
#' @importFrom rlang %||% .data abort caller_arg caller_env
"_PACKAGE"
