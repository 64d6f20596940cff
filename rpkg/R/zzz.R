# What this session has loaded and attached: the Python module and the Spark applications.
the <- new.env(parent = emptyenv())
the$pybackend <- NULL
the$applications <- list()

.onLoad <- function(libname, pkgname) {
  # With Python already running, import() would not wait, and an absent module would make
  # library(tfdist) fail.
  if (!reticulate::py_available()) {
    reticulate::import("pybackend", delay_load = list(environment = "r-tfdist", priority = 5))
  }
}
