#' Stop poor trials early
#'
#' Values for the `prune` argument of [train_many()].
#'
#' `median_pruning()` stops a trial whose best value so far is worse than the median of the best
#' values that the other trials had after the same epoch (Golovin et al., 2017).
#'
#' `successive_halving()` stops all but the best trials after `first` epochs, after `factor` times
#' as many, and so on. At each of these epochs, a trial continues if it is among the best
#' `1 / factor` of the trials that have reached the epoch so far. No trial waits for others (ASHA,
#' Li et al., 2020).
#'
#' @param warmup_epochs Number of epochs that every trial runs.
#' @param warmup_trials Number of other trials that must have reached the epoch.
#' @param first Number of epochs before the first comparison.
#' @param factor Each comparison keeps one in this many trials, and is after this many times as many
#'   epochs as the one before.
#'
#' @return An object for [train_many()]. Invalid arguments raise an error of class
#'   `tfdist_error_input`.
#' @export
#' @examples
#' median_pruning(warmup_epochs = 2)
#' successive_halving(first = 1, factor = 3)
median_pruning <- function(warmup_epochs = 1, warmup_trials = 4) {
  fields <- list(warmup_epochs = warmup_epochs, warmup_trials = warmup_trials)
  new_options(fields, "tfdist_median_pruning")
}

#' @rdname median_pruning
#' @export
successive_halving <- function(first = 1, factor = 3) {
  new_options(list(first = first, factor = factor), "tfdist_successive_halving")
}
