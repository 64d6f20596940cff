# The job in RStudio's Background Jobs pane that shows a training. If a function of the pane fails,
# the training continues without the job.

# RStudio ends a job by itself when its progress is complete.
pane_units <- 1000L

new_pane <- function() {
  shown <- getOption("tfdist.job_pane", TRUE)
  check_flag(shown, arg = "options(tfdist.job_pane = )")
  rlang::env(is_shown = shown, job = NULL, units = 0L, status = NULL)
}

update_pane <- function(pane, kind, event) {
  if (pane$is_shown) {
    tryCatch(suppressWarnings(show_in_pane(pane, kind, event)), error = function(error) {
      pane$is_shown <- FALSE
    })
  }
  invisible()
}

show_in_pane <- function(pane, kind, event) {
  if (is.null(pane$job) && kind %in% c("begin", "step", "epoch", "trials")) {
    pane$is_shown <- has_job_pane()
    if (!pane$is_shown) {
      return()
    }
    # With `show = TRUE`, the pane would cover the console.
    pane$job <- rstudioapi::jobAdd(
      if (kind == "trials") "tfdist: trials" else "tfdist: training",
      progressUnits = pane_units,
      running = TRUE,
      autoRemove = FALSE,
      show = FALSE
    )
  }
  if (is.null(pane$job)) {
    return()
  }
  if (!is.null(event$text)) {
    rstudioapi::jobAddOutput(pane$job, paste0(event$text, "\n"), error = kind == "close")
  }
  switch(
    kind,
    step = advance_job(
      pane,
      (event$epoch - 1 + event$step / event$steps) / event$epochs,
      paste(c(describe_step(event), describe_loss(event)), collapse = "  ")
    ),
    epoch = advance_job(pane, event$epoch / event$epochs, event$text),
    trials = advance_job(
      pane,
      event$done / event$total,
      sprintf("%d of %s completed", event$done, format_count(event$total, "trial"))
    ),
    status = pane$status <- event$status,
    close = close_job(pane, event$outcome)
  )
}

# `hasFun()` takes RStudio's own name of the function. Positron, which also answers rstudioapi, may
# lack it.
has_job_pane <- function() {
  requireNamespace("rstudioapi", quietly = TRUE) &&
    rstudioapi::isAvailable() &&
    rstudioapi::hasFun("addJob")
}

describe_step <- function(event) {
  sprintf("epoch %d/%d  step %d/%d", event$epoch, event$epochs, event$step, event$steps)
}

advance_job <- function(pane, share, status) {
  rstudioapi::jobSetStatus(pane$job, status)
  units <- as.integer(share * (pane_units - 1L))
  # Epochs that a restart repeats would decrease it, which is an error.
  if (units > pane$units) {
    rstudioapi::jobSetProgress(pane$job, units)
    pane$units <- units
  }
}

# `outcome` is a state of RStudio's jobs, or "left" if only the waiting for a detached job ended.
close_job <- function(pane, outcome) {
  if (outcome == "left" || identical(pane$status, "running")) {
    rstudioapi::jobRemove(pane$job)
  } else {
    state <- if (identical(pane$status, "cancelled")) "cancelled" else outcome
    rstudioapi::jobSetState(pane$job, state)
  }
}
