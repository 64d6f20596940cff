# State of this session: the Python module, the attached Spark applications, the running
# TensorBoards, and what Python's callbacks in R left behind.
the <- new.env(parent = emptyenv())
the$pybackend <- NULL
the$applications <- list()
the$boards <- list()
the$observer_error <- NULL
the$warnings <- list()

.onLoad <- function(libname, pkgname) {
  # reticulate and its imports take seconds to load, and are not needed before Python.
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
