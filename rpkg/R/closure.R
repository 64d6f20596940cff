# A function of R, made to run in other R sessions: with the variables that it uses, the names of
# the packages that it needs, and nothing of this package.

# More than this is a mistake: rows travel as `data`, or are read by the workers.
largest_closure <- function() getOption("tfdist.max_function_mb", 256) * 2^20

# The RFunction of Python, which the workers call. `pack` turns its value into what Python takes.
as_r_function <- function(f, packages, pack, extra = list(), arg, call) {
  variables <- used_variables(f, arg, call)
  check_closure_size(f, variables$globals, extra, arg, call)
  carrier <- new_carrier(utils::removeSource(f), variables$globals, extra, pack)
  backend <- pybackend(call)
  call_python(
    backend$RFunction,
    serialize(carrier, NULL),
    packages = as.list(union(packages, variables$packages)),
    library_paths = as.list(.libPaths()),
    call = call
  )
}

new_carrier <- function(f, globals, extra, pack) {
  force(pack)
  environment(pack) <- baseenv()
  frame <- list2env(list(f = f, globals = globals, extra = extra, pack = pack), parent = baseenv())
  carrier <- function(...) {
    list2env(globals, envir = globalenv())
    value <- if (length(extra)) do.call("f", c(list(...), extra), quote = TRUE) else f(...)
    pack(value)
  }
  environment(carrier) <- frame
  carrier
}

# What the function uses: variables of the user's workspace, which serialize() leaves behind, and
# packages that are attached here. What its own environment holds goes along anyway.
used_variables <- function(f, arg, call) {
  found <- globals::globalsOf(f, envir = environment(f), mustExist = FALSE, recursive = TRUE)
  found <- globals::cleanup(found)
  check_no_python(found, arg, call)
  where <- attr(found, "where")
  in_workspace <- vapply(where, identical, NA, globalenv())
  list(
    globals = unclass(found)[in_workspace],
    packages = setdiff(globals::packagesOf(found), c(default_packages(), "tfdist"[!is_attached()]))
  )
}

default_packages <- function() {
  c("base", "stats", "graphics", "grDevices", "utils", "datasets", "methods")
}

is_attached <- function() "package:tfdist" %in% search()

check_no_python <- function(found, arg, call) {
  is_pointer <- vapply(found, is_python, NA)
  if (any(is_pointer)) {
    name <- names(found)[is_pointer][[1L]]
    module <- tryCatch(found[[name]]$`__name__`, error = function(error) NULL)
    hint <- if (inherits(found[[name]], "python.builtin.module") && is.character(module)) {
      sprintf("Import it inside the function: `%s <- reticulate::import(\"%s\")`.", name, module)
    } else {
      "Make it inside the function."
    }
    abort_input(
      c(
        sprintf(
          "`%s` uses `%s`, a Python object of this session, which does not travel.",
          arg,
          name
        ),
        i = hint
      ),
      call = call
    )
  }
}

# Measured before it is serialized, which for gigabytes takes minutes.
check_closure_size <- function(f, globals, extra, arg, call) {
  held <- c(globals, captured_variables(environment(f)), extra)
  sizes <- vapply(held, function(object) as.double(utils::object.size(object)), 1)
  if (sum(sizes) <= largest_closure()) {
    return(invisible())
  }
  largest <- utils::head(sort(sizes[sizes > sum(sizes) / 100], decreasing = TRUE), 3L)
  named <- sprintf("`%s` (%s MB)", names(largest), format_mb(largest))
  abort_input(
    c(
      sprintf(
        "`%s` carries %s MB to every worker, more than the %s MB allowed.",
        arg,
        format_mb(sum(sizes)),
        format_mb(largest_closure())
      ),
      x = sprintf("The largest variables that it captures: %s.", toString(named)),
      i = "Give rows as `data`, or have the function read them from a file on the workers.",
      i = "Define the function where large variables that it does not need are out of its sight.",
      i = "`options(tfdist.max_function_mb = )` allows more."
    ),
    call = call
  )
}

# The variables of a function's environments up to the workspace or a package.
captured_variables <- function(environment) {
  held <- list()
  while (is_local_environment(environment)) {
    held <- c(held, as.list(environment, all.names = TRUE))
    environment <- parent.env(environment)
  }
  held
}

is_local_environment <- function(environment) {
  !identical(environment, globalenv()) &&
    !identical(environment, emptyenv()) &&
    !identical(environment, baseenv()) &&
    !isNamespace(environment) &&
    is.null(attr(environment, "name"))
}

format_mb <- function(bytes) {
  format(round(bytes / 2^20), big.mark = ",", scientific = FALSE, trim = TRUE)
}
