# The function that shows the progress of Python's calls. Python calls it on this thread, with the
# kind of an event and a list of its values.
new_progress <- function() {
  now <- rlang::env(bar = NULL, recent = list(), pane = new_pane())
  function(kind, event = list()) {
    keep_conditions({
      update_pane(now$pane, kind, event)
      show_event(now, kind, event)
    })
  }
}

show_event <- function(now, kind, event) {
  switch(
    kind,
    is_live = return(is_live_console()),
    begin = ,
    trials = ,
    line = show_line(event$text),
    phase = show_phase(now, event$name),
    step = show_step(now, event),
    epoch = {
      end_bar(now)
      show_line(event$text)
    },
    end = end_bar(now)
  )
  invisible()
}

# Workers of an elastic training may connect again between two steps.
show_phase <- function(now, name) {
  if (is.null(now$bar$phase)) {
    end_bar(now)
    now$bar <- rlang::env(phase = name)
    now$bar$id <- add_bar("{phase}", total = NA, bar = now$bar)
  }
  now$bar$phase <- name
  cli::cli_progress_update(id = now$bar$id, force = TRUE, .envir = now$bar)
}

show_step <- function(now, event) {
  if (is.null(now$bar) || !is.null(now$bar$phase)) {
    end_bar(now)
    now$bar <- start_bar(event)
    now$recent <- list()
  }
  now$bar$figures <- paste(c(describe_loss(event), describe_speed(now, event)), collapse = "  ")
  cli::cli_progress_update(set = event$step, id = now$bar$id, force = TRUE, .envir = now$bar)
}

end_bar <- function(now) {
  if (!is.null(now$bar)) {
    cli::cli_progress_done(id = now$bar$id, .envir = now$bar)
    now$bar <- NULL
  }
}

# For code that Python calls: if a message or a warning reached a handler outside the Python call,
# such as that of tryCatch(), R would jump over Python's frames, and Python would crash later. So
# messages are printed here, and warnings are raised after Python has returned.
keep_conditions <- function(code) {
  withCallingHandlers(
    code,
    message = function(message) {
      cat(conditionMessage(message), file = message_connection())
      rlang::cnd_muffle(message)
    },
    warning = function(warning) {
      the$warnings <- c(the$warnings, list(warning))
      rlang::cnd_muffle(warning)
    }
  )
}

# The same, for functions of the user: on its way through Python an error would lose its class.
within_python <- function(code) {
  withCallingHandlers(keep_conditions(code), error = function(error) the$observer_error <- error)
}

# Documents include only standard output.
message_connection <- function() {
  if (is_knitting()) stdout() else cli::cli_output_connection()
}

is_knitting <- function() isTRUE(getOption("knitr.in.progress"))

signal_kept_warnings <- function() {
  kept <- the$warnings
  the$warnings <- list()
  lapply(kept, warning)
}

# TRUE if the console can change its last line; not in a document or a script.
is_live_console <- function() {
  rlang::is_interactive() && cli::is_dynamic_tty() && !is_knitting() && !is_silenced()
}

# Progress does not use conditions: a handler could jump over Python's frames, as
# keep_conditions() explains.
is_silenced <- function() {
  is_call <- function(frame) identical(sys.function(frame), suppressMessages)
  any(vapply(seq_len(sys.nframe()), is_call, NA))
}

# Above a bar, if there is one: cli redraws the bar at the bottom.
show_line <- function(text) {
  if (is_live_console()) {
    cli::cli_verbatim(text)
  } else if (!is_silenced()) {
    cat(text, "\n", sep = "")
  }
}

# Building a model imports TensorFlow, which takes seconds in which nothing else is shown.
announce_tensorflow <- function(model, verbose) {
  if (verbose > 0L && !is_python(model) && !is_imported("tensorflow")) {
    show_line("Loading TensorFlow ...")
  }
}

is_imported <- function(module) {
  modules <- reticulate::import("sys", convert = FALSE)$modules
  reticulate::py_to_r(modules$`__contains__`(module))
}

# The environment of a bar for an epoch; cli evaluates its format there.
start_bar <- function(event) {
  bar <- rlang::env(epoch = sprintf("epoch %d/%d", event$epoch, event$epochs), figures = "")
  # The bar itself would take half of a narrow console.
  done <- if (cli::console_width() < 100L) "cli::pb_percent" else "cli::pb_bar"
  format <- paste0("{epoch} {", done, "} step {cli::pb_current}/{cli::pb_total}  {figures}")
  bar$id <- add_bar(format, event$steps, bar)
  bar
}

add_bar <- function(format, total, bar) {
  cli::cli_progress_bar(
    total = total,
    format = format,
    clear = TRUE,
    auto_terminate = FALSE,
    .auto_close = FALSE,
    .envir = bar
  )
}

describe_loss <- function(event) if (is.numeric(event$loss)) paste("loss", show_loss(event$loss))

# Rows per second, and the time until the training's last step, from an epoch's last reports.
describe_speed <- function(now, event, most = 20L) {
  now$recent <- utils::tail(c(now$recent, list(event)), most)
  first <- now$recent[[1L]]
  steps <- event$step - first$step
  seconds <- event$seconds - first$seconds
  if (steps > 0 && seconds > 0) {
    left <- event$steps - event$step + event$steps * (event$epochs - event$epoch)
    rows <- format_number(round((event$rows - first$rows) / seconds))
    c(sprintf("%s rows/s", rows), paste("ETA", format_seconds(left * seconds / steps)))
  }
}

# As in Python: an estimate is in seconds or, from 100 s on, in minutes.
format_seconds <- function(seconds) {
  if (seconds < 99.5) {
    return(sprintf("%.0f s", seconds))
  }
  minutes <- as.integer(round(seconds / 60))
  hours <- if (minutes >= 60L) sprintf("%d h", minutes %/% 60L)
  paste(c(hours, if (minutes %% 60L > 0L) sprintf("%d min", minutes %% 60L)), collapse = " ")
}
