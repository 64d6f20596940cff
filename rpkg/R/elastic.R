#' Let workers leave and join a training run
#'
#' Value for the `workers` argument of [barrier_train()]: training continues without workers that
#' fail or are preempted. A lost worker costs the step that failed: the others share the rest of the
#' epoch's rows. Other workers may join between two epochs, or when a worker is lost.
#' [barrier_train()] describes the exceptions, and what takes the place of a lost worker.
#'
#' @return An object for [barrier_train()]. Invalid arguments raise an error of class
#'   `tfdist_error_input`.
#' @export
#' @examples
#' elastic(4, min = 2, max = 8)
#' \dontrun{
#' fit <- barrier_train(hosts("a:4,b:4"), model, data, workers = elastic(4, min = 2, max = 8))
#' fit$workers_by_epoch
#' }
elastic <- new_maker("elastic")
