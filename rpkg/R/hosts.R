#' Run workers on hosts over ssh
#'
#' Value for the `sc` argument of [barrier_train()], [barrier_evaluate()], [barrier_predict()],
#' [barrier_apply()] and [train_mnist()]. The hosts need Python with TensorFlow, and an ssh server
#' that lets you log in without a password. tfdist, the model and the rows are sent to them. This
#' machine reaches them only over ssh; the workers connect to each other. When a call ends, for
#' any reason, it leaves nothing behind on the hosts. Only with
#' `resources(fork_server = TRUE)`, a process on each host waits for later calls; it ends with this
#' session, or after ten minutes without a call.
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
hosts <- new_maker("hosts", "launcher")

has_spark <- function(route) !route$kind %in% c("local", "launcher")

place_without_spark <- function(route) {
  if (route$kind == "local") "this machine without Spark" else "a launcher without Spark"
}
