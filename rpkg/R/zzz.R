# What this session has loaded, attached to or started: the Python module, the Spark applications,
# and TensorBoards.
the <- new.env(parent = emptyenv())
the$pybackend <- NULL
the$applications <- list()
the$boards <- list()
the$observer_error <- NULL
the$warnings <- list()

.onLoad <- function(libname, pkgname) {
  # reticulate takes seconds to load with what it imports, and is not needed before Python is.
  when_loaded("reticulate", declare_python)
  when_loaded("parsnip", register_engine)
}

when_loaded <- function(package, act) {
  if (isNamespaceLoaded(package)) {
    act()
  } else {
    setHook(packageEvent(package, "onLoad"), \(...) act())
  }
}

declare_python <- function() {
  # If Python is already running, import() would not wait, and a missing module would make
  # library(tfdist) fail.
  if (reticulate::py_available()) {
    quiet_imports()
  } else {
    reticulate::import("pybackend", delay_load = list(environment = "r-tfdist", priority = 5))
    setHook("reticulate.onPyInit", quiet_imports)
  }
}
