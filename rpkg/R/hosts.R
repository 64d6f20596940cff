#' Run workers on hosts over ssh
#'
#' Value for the `sc` argument of [barrier_train()], [barrier_evaluate()], [barrier_predict()],
#' [barrier_apply()] and [train_mnist()]. The hosts need Python with TensorFlow, and an ssh server
#' that lets you log in without a password. tfdist, the model and the rows are sent to them. This
#' machine reaches them only over ssh; the workers connect to each other. When a call ends, for
#' whatever reason, it leaves nothing behind on the hosts.
#'
#' @param hosts Host names, each with its number of slots (default 1), as one string or several:
#'   `"a:2,b:2"`, or `c("a:2", "b:2")`. `"user@a:2"` logs in as a different user; `"[fd00::1]:2"` is
#'   an IPv6 address. Workers fill the hosts in this order. All slots are used, unless `workers` is
#'   set.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param hostfile A file to use instead of `hosts`, with one host per line: `a slots=2` or `a:2`.
#' @param python Path to Python on the hosts. Python must be the same release as in this session
#'   (e.g. 3.11). `NULL` (default): the same path as in this session.
#' @param ssh_options Command-line options for ssh, e.g. `c("-p", "2222", "-i", "~/.ssh/cluster")`.
#'   `~/.ssh/config` is respected.
#' @param environment Environment variables for the workers, as a named vector. If you set `TMPDIR`,
#'   the workers store their rows there during the call.
#'
#' @return An object for the `sc` argument. Invalid arguments raise an error of class
#'   `tfdist_error_input`.
#' @export
#' @examples
#' hosts("a:2,b:2")
#' \dontrun{
#' fit <- train_mnist(hosts("a:2,b:2"))
#' fit <- barrier_train(hosts(hostfile = "~/hosts"), model, data, workers = 4)
#' }
hosts <- function(
  hosts = NULL,
  ...,
  hostfile = NULL,
  python = NULL,
  ssh_options = NULL,
  environment = NULL
) {
  check_dots_empty(...)
  if (is.null(hosts) == is.null(hostfile)) {
    abort_input("Give either `hosts`, e.g. `\"a:2,b:2\"`, or `hostfile`.")
  }
  fields <- list(
    hosts = check_hosts(hosts),
    hostfile = check_hostfile(hostfile),
    python = check_string(python, allow_null = TRUE),
    ssh_options = check_ssh_options(ssh_options),
    environment = check_environment(environment)
  )
  new_launcher(fields, "hosts")
}

# `maker` is the name of the function in R and in Python. If Python is already running, it checks
# what R does not check, such as the lines of a hostfile; otherwise at the launcher's first use.
new_launcher <- function(fields, maker, call = caller_env()) {
  made <- new_options(fields, c(paste0("tfdist_", maker), "tfdist_launcher"))
  if (!is.null(the$pybackend)) {
    as_python_launcher(made, call)
  }
  made
}

as_python_launcher <- function(launcher, call = caller_env()) {
  fields <- Filter(Negate(is.null), unclass(launcher))
  # reticulate converts a vector of length one to a string.
  fields$ssh_options <- if (!is.null(fields$ssh_options)) as.list(fields$ssh_options)
  if (!is.null(fields$environment)) {
    variables <- fields$environment
    fields$environment <- reticulate::py_dict(as.list(names(variables)), as.list(variables))
  }
  maker <- pybackend(call)[[sub("^tfdist_", "", class(launcher)[[1L]])]]
  do.call(call_python, c(list(maker, call = call), fields))
}

has_spark <- function(route) !route$kind %in% c("local", "launcher")

place_without_spark <- function(route) {
  if (route$kind == "local") "this machine without Spark" else "a launcher without Spark"
}

check_hosts <- function(x, arg = caller_arg(x), call = caller_env()) {
  check_strings(x, allow_null = TRUE, arg = arg, call = call)
  entries <- trimws(unlist(strsplit(as.character(x), ",", fixed = TRUE)))
  user <- "([^@:[:space:]-][^@:[:space:]]*@)?"
  host <- "(\\[[0-9A-Fa-f:.]+(%[[:alnum:]_]+)?\\]|[[:alnum:]_][[:alnum:]_.-]*)"
  wrong <- entries[!grepl(paste0("^", user, host, "(:[1-9][0-9]*)?$"), entries)]
  if (length(wrong) > 0L) {
    abort_input(
      c(
        sprintf("`%s` lists %s, which is not a host.", arg, describe(wrong[[1L]])),
        i = "Expected `name`, `name:slots`, `user@name:slots` or `[IPv6 address]:slots`."
      ),
      call = call
    )
  }
  invisible(x)
}

check_hostfile <- function(x, arg = caller_arg(x), call = caller_env()) {
  check_string(x, allow_null = TRUE, arg = arg, call = call)
  if (!is.null(x) && !file.exists(x)) {
    expected <- "Expected a file with a host per line: `a slots=2` or `a:2`."
    abort_input(c(sprintf("`%s` does not exist: %s.", arg, x), i = expected), call = call)
  }
  invisible(x)
}

# ssh would read "-p 22" as the port " 22".
check_ssh_options <- function(x, arg = caller_arg(x), call = caller_env()) {
  check_strings(x, allow_null = TRUE, arg = arg, call = call)
  joined <- grep("^-[A-Za-z][[:space:]]", x, value = TRUE)
  if (length(joined) > 0L) {
    option <- joined[[1L]]
    words <- encodeString(c(substr(option, 1L, 2L), trimws(substring(option, 3L))), quote = "\"")
    abort_input(
      c(
        sprintf("`%s` has %s, which must be two strings.", arg, describe(option)),
        i = sprintf("Write `c(%s)`.", toString(words))
      ),
      call = call
    )
  }
  invisible(x)
}

check_environment <- function(x, arg = caller_arg(x), call = caller_env()) {
  found <- check_variables(x, arg = arg, call = call)
  wrong <- grep("^[A-Za-z_][A-Za-z0-9_]*$", names(found), value = TRUE, invert = TRUE)
  if (length(wrong) > 0L) {
    abort_input(
      sprintf("`%s` has %s, which is not the name of a variable.", arg, describe(wrong[[1L]])),
      call = call
    )
  }
  invisible(found)
}

check_variables <- function(x, arg = caller_arg(x), call = caller_env()) {
  check_strings(unlist(x), allow_null = TRUE, arg = arg, call = call)
  if (!is.null(x) && !rlang::is_named(x)) {
    abort_expected(x, "a named vector of strings", TRUE, arg, call)
  }
  invisible(unlist(x))
}
