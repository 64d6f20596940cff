# Worker process in R, with Python and TensorFlow embedded by reticulate. It takes the arguments of
# `python -m pybackend.core.worker`.
arguments <- commandArgs(trailingOnly = TRUE)
if (!requireNamespace("reticulate", quietly = TRUE)) {
  stop("the R package reticulate is not installed in ", toString(.libPaths()), call. = FALSE)
}
if (utils::packageVersion("reticulate") < "1.39") {
  stop("reticulate ", utils::packageVersion("reticulate"), " is too old: install 1.39 or newer")
}
functions <- reticulate::import("pybackend.core.r.function")
functions$host(eval(parse(text = functions$read_glue())))
worker <- reticulate::import("pybackend.core.worker")
worker$leave(worker$main(as.list(arguments)))
