#' How the workers exchange what they have learned
#'
#' For the argument `exchange` of [barrier_train()]. `exchange()` averages the gradients at every
#' step, which gives the weights of one process on the whole batch. `local_steps()` lets each worker
#' take several steps on its own and then averages the weights: less traffic for slow networks, but
#' another result (local SGD). With one worker there is nothing to exchange.
#'
#' @param transport What carries the gradients: `"tcp"`, or `"tf"` for TensorFlow's collectives
#'   (NCCL between GPUs).
#' @param compression `"fp16"` or `"bf16"` halves the traffic. Rounding errors are kept and sent
#'   later, but the result is no longer that of one process. `NULL` is exact.
#' @param bucket_mb Megabytes of gradients that travel together during the backward pass; `Inf`
#'   sends everything at once after it.
#' @param loss_over What the loss is computed over. `"rows"`: each worker computes the loss of its
#'   own rows, which must be a mean over rows. `"global batch"`: the workers send each other their
#'   outputs, labels and weights in each step, and compute the loss of all rows. Then it may compare
#'   or sum the rows of a batch (contrastive, ranking, correlation, soft F1, sums), and masks may
#'   reach several losses.
#' @param encrypt Whether what the workers send each other is encrypted and authenticated (TLS 1.3).
#'   `NULL`: what leaves a machine is. `FALSE`: nothing is; that is for fast networks that you
#'   trust.
#' @param audit Whether some steps are repeated as one process takes them, on the rows of all
#'   workers, and what comes of them is compared: the first and the last of the first epoch, the
#'   first of the second one, and of later ones as many as take 2 % of the time. A difference that
#'   rounding does not explain is an error; with `"warn"` a note. It alone finds losses that are no
#'   mean over rows. Not with `compression`.
#' @param steps Steps that each worker takes on its own before the weights are averaged, at least 2.
#' @param learning_rate,momentum How the average change is applied. 0.7 and 0.9 give DiLoCo.
#'
#' @return An object for [barrier_train()]. Bad arguments are an error of class
#'   `tfdist_error_input`.
#' @export
#' @examples
#' exchange(compression = "bf16")
#' exchange(loss_over = "global batch")
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
  audit = TRUE
) {
  check_one_of(transport, c("tcp", "tf"))
  check_compression(compression)
  check_one_of(loss_over, c("rows", "global batch"))
  if (transport == "tf" && !is.null(compression)) {
    abort_input(
      c(
        "`compression` works only with `transport = \"tcp\"`.",
        i = "Leave out `compression`, or use `transport = \"tcp\"`."
      )
    )
  }
  check_flag(encrypt, allow_null = TRUE)
  if (transport == "tf" && isTRUE(encrypt)) {
    abort_input(
      c(
        "`encrypt = TRUE` works only with `transport = \"tcp\"`.",
        i = "TensorFlow's own servers cannot encrypt. Use `transport = \"tcp\"`."
      )
    )
  }
  if (!identical(audit, "warn") && !rlang::is_bool(audit)) {
    abort_input(sprintf("`audit` must be `TRUE`, `FALSE` or \"warn\", not %s.", describe(audit)))
  }
  fields <- list(
    transport = transport,
    compression = compression,
    bucket_mb = check_positive(bucket_mb, finite = FALSE),
    loss_over = loss_over,
    encrypt = encrypt,
    audit = audit
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
  fields <- list(
    steps = check_count(steps, min = 2L),
    learning_rate = check_positive(learning_rate),
    momentum = check_fraction(momentum),
    compression = check_compression(compression),
    encrypt = check_flag(encrypt, allow_null = TRUE)
  )
  new_options(fields, "tfdist_local_steps")
}

check_compression <- function(x, arg = caller_arg(x), call = caller_env()) {
  check_one_of(x, c("fp16", "bf16"), allow_null = TRUE, arg = arg, call = call)
}
