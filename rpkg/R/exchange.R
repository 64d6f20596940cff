#' Options for the data exchange between workers
#'
#' Value for the `exchange` argument of [barrier_train()]. `exchange()` averages the gradients in
#' every step, so the result is the same as that of one process that trains on the global batches.
#' `local_steps()` lets each worker take several steps before the weights are averaged (local SGD).
#' This reduces traffic on slow networks, but changes the result. With one worker, these options
#' have no effect.
#'
#' @param scale_lr `"linear"` or `"sqrt"`: multiplies the learning rate by the number of workers or
#'   by its square root, because a step covers the rows of all workers. Or a list with one of these,
#'   `warmup_epochs` and `decay`; see the section on learning rates. The history records the rate of
#'   each epoch's last step as `learning_rate`. `NULL` (default): the optimizer's rate.
#'
#' @return An object for [barrier_train()]. Invalid arguments raise an error of class
#'   `tfdist_error_input`.
#' @section Learning rates:
#' With `scale_lr`, the rate of each step is the optimizer's own rate, as compiled or as set by
#' callbacks, multiplied by a factor. With N workers, the factor is N for `"linear"` (Goyal et al.,
#' 2017), and the square root of N for `"sqrt"` (Krizhevsky, 2014), which suits Adam and similar
#' optimizers. The optimizer's variable does not change, so the trained model and every checkpoint
#' contain the unscaled rate. In `list("sqrt", warmup_epochs = 5, decay = c("30" = 0.1))`,
#' * `warmup_epochs` is the number of epochs, possibly fractional, over which the rate rises step by
#'   step from the unscaled to the scaled value;
#' * `decay` has factors by which the rate is multiplied. The name of each factor is the number of
#'   completed epochs after which it applies.
#' @export
#' @examples
#' exchange(compression = "bf16")
#' exchange(loss_over = "global batch")
#' exchange(shard_optimizer = TRUE)
#' exchange(scale_lr = list("sqrt", warmup_epochs = 5, decay = c("30" = 0.1, "60" = 0.01)))
#' local_steps(100, learning_rate = 0.7, momentum = 0.9)
#' \dontrun{
#' barrier_train(sc, model, data, workers = 8, exchange = exchange(transport = "tf"))
#' barrier_train(sc, model, data, workers = 8, exchange = local_steps(100))
#' }
exchange <- new_maker("exchange")

#' @rdname exchange
#' @export
local_steps <- new_maker("local_steps")
