# What this session has loaded, attached to or started: the Python module, the Spark applications,
# and TensorBoards.
the <- new.env(parent = emptyenv())
the$pybackend <- NULL
the$applications <- list()
the$boards <- list()
the$observer_error <- NULL
the$warnings <- list()

.onLoad <- function(libname, pkgname) {
  # If Python is already running, import() would not wait, and a missing module would make
  # library(tfdist) fail.
  if (reticulate::py_available()) {
    quiet_imports()
  } else {
    reticulate::import("pybackend", delay_load = list(environment = "r-tfdist", priority = 5))
    setHook("reticulate.onPyInit", quiet_imports)
  }
  if (isNamespaceLoaded("parsnip")) {
    register_engine()
  } else {
    setHook(packageEvent("parsnip", "onLoad"), register_engine)
  }
}
