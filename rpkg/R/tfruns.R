# Runs of tfruns: they get the same metadata as from keras3's fit() and evaluate(), for ls_runs().

# keras3 loads tfruns, and so does the start of a run.
is_run_active <- function() isNamespaceLoaded("tfruns") && tfruns::is_run_active()

record_training <- function(fit) {
  if (!is_run_active()) {
    return(invisible())
  }
  wide <- wide_history(fit)
  tfruns::write_run_metadata("metrics", wide[names(wide) != "epoch"])
  # A model that cannot be read here must not make the training fail.
  described <- tryCatch(describe_model(fit_model(fit)), error = function(error) NULL)
  properties <- list(
    samples = sum(fit$workers$rows),
    workers = nrow(fit$workers),
    epochs = fit$settings$epochs,
    batch_size = fit$settings$batch_size
  )
  tfruns::write_run_metadata("properties", drop_null(c(properties, described)))
  if (length(fit$metrics)) {
    record_evaluation(rlang::set_names(fit$metrics, sub("^test_", "", names(fit$metrics))))
  }
}

record_evaluation <- function(figures) {
  if (is_run_active()) {
    tfruns::write_run_metadata("evaluation", as.list(unlist(figures)))
  }
}

describe_model <- function(model) {
  loss <- model$loss
  if (is_python(loss)) {
    loss <- if (reticulate::py_has_attr(loss, "name")) loss$name else loss$`__name__`
  }
  list(
    model = reticulate::py_capture_output(model$summary(line_length = 80L)),
    loss_function = if (rlang::is_string(loss)) loss,
    optimizer = model$optimizer$name,
    learning_rate = as.double(model$optimizer$learning_rate$numpy())
  )
}
