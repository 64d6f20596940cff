#' Options for the data exchange between workers
#'
#' Value for the `exchange` argument of [barrier_train()]. `exchange()` averages the gradients in
#' every step, so the result is the same as that of one process that trains on the global batches.
#' `local_steps()` lets each worker take several steps before the weights are averaged (local SGD).
#' This reduces traffic on slow networks, but changes the result. With one worker, these options
#' have no effect.
#'
#' @param transport `"tcp"` (default), or `"tf"` for TensorFlow's collectives (NCCL between GPUs).
#'   TensorFlow's servers accept any connection: use `"tf"` only on networks that you trust.
#' @param compression `"fp16"` or `"bf16"` halves the traffic. Rounding errors are added back in
#'   later steps, but the result is no longer the same as that of one process. `NULL` (default): no
#'   compression, and an exact result.
#' @param bucket_mb Megabytes of gradients per message. Messages are sent during the backward pass.
#'   `Inf`: all gradients are sent at once, after the backward pass.
#' @param loss_over Rows over which the loss is computed. `"rows"` (default): each worker computes
#'   the loss of its own rows. The loss must be a mean over rows. `"global batch"`: in each step,
#'   the workers exchange their outputs, labels and weights, and compute the loss of all rows. The
#'   loss may then compare or sum the rows of a batch (contrastive, ranking, correlation, soft F1,
#'   sums), and a model with masks may have several losses.
#' @param encrypt `TRUE` encrypts and authenticates the data that the workers exchange (TLS 1.3).
#'   `NULL` (default) encrypts only the traffic between machines. `FALSE` disables encryption: use
#'   it only on fast networks that you trust.
#' @param audit `TRUE` (default) repeats some steps in one process, on the rows of all workers, and
#'   compares the results. It repeats the first step of the first epoch and its last one, if that
#'   has another number of rows, the first step of the second epoch, and as many steps as fit into
#'   2% of the training time. The numbers of the rows of all steps are checked, too. A difference
#'   that rounding cannot explain raises an error. `"warn"` shows a note instead of raising the
#'   error. Only the audit detects losses that are not a mean over rows. With `compression`, the
#'   repeated step exchanges uncompressed gradients. `FALSE`: no audit.
#' @param shard_optimizer `TRUE`: each worker holds the optimizer's state for only a part of the
#'   weights. It updates this part, and receives the new values of the other weights (ZeRO, stage
#'   1). With N workers, Adam's state takes 2/N instead of 2 times the size of the weights, unless a
#'   single variable is larger than that. The result is the same, and the traffic does not grow,
#'   except that embeddings with sparse gradients are sent whole. While rank 0 writes the model or a
#'   checkpoint, it holds the state of all workers. Works only with `transport = "tcp"`, and without
#'   `compression`. `FALSE` (default): each worker holds the whole state.
#' @param steps Number of steps, at least 2, that each worker takes before the weights are averaged.
#' @param learning_rate,momentum Learning rate and momentum for applying the average change in the
#'   weights. Values of 0.7 and 0.9 correspond to DiLoCo.
#'
#' @return An object for [barrier_train()]. Invalid arguments raise an error of class
#'   `tfdist_error_input`.
#' @export
#' @examples
#' exchange(compression = "bf16")
#' exchange(loss_over = "global batch")
#' exchange(shard_optimizer = TRUE)
#' local_steps(100, learning_rate = 0.7, momentum = 0.9)
#' \dontrun{
#' barrier_train(sc, model, data, workers = 8, exchange = exchange(transport = "tf"))
#' barrier_train(sc, model, data, workers = 8, exchange = local_steps(100))
#' }
exchange <- function(
  transport = "tcp",
  compression = NULL,
  bucket_mb = 25,
  loss_over = "rows",
  encrypt = NULL,
  audit = TRUE,
  shard_optimizer = FALSE
) {
  fields <- list(
    transport = transport,
    compression = compression,
    bucket_mb = bucket_mb,
    loss_over = loss_over,
    encrypt = encrypt,
    audit = audit,
    shard_optimizer = shard_optimizer
  )
  new_options(fields, "tfdist_exchange")
}

#' @rdname exchange
#' @export
local_steps <- function(
  steps,
  learning_rate = 1,
  momentum = 0,
  compression = NULL,
  encrypt = NULL
) {
  check_given()
  fields <- list(
    steps = steps,
    learning_rate = learning_rate,
    momentum = momentum,
    compression = compression,
    encrypt = encrypt
  )
  new_options(fields, "tfdist_local_steps")
}
