# An R function, prepared to run in other R sessions: with the variables that it uses, the names of
# the packages that it needs, and nothing from this package.

# The RFunction in Python, which the workers call. `pack` converts its value for Python.
as_r_function <- function(f, packages, pack, extra = list(), arg) {
  variables <- find_variables(f, arg)
  check_no_python(extra, arg)
  check_closure_size(f, variables$globals, extra, arg)
  carrier <- new_carrier(utils::removeSource(f), variables$globals, extra, pack)
  bytes <- serialize(carrier, NULL)
  # The size of environments, such as those of R6 objects, is known only after serializing.
  if (length(bytes) > max_closure_bytes()) {
    abort_too_large(length(bytes), NULL, arg)
  }
  call_python(
    pybackend()$RFunction,
    bytes,
    packages = as.list(union(packages, variables$packages)),
    library_paths = as.list(.libPaths())
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

# The variables of the workspace that the function uses, which serialize() omits, and the attached
# packages. serialize() includes the function's own environment. All functions of the workspace are
# sent: S3 methods, and functions that do.call() names, cannot be found in the source text.
find_variables <- function(f, arg) {
  found <- find_globals(f)
  for (g in list_functions(found$values)) {
    found <- Map(c, found, find_globals(g))
  }
  check_no_python(found$values, arg)
  in_workspace <- vapply(found$where, is_workspace, NA)
  used <- found$values[in_workspace]
  left_out <- c("base", "stats", "graphics", "grDevices", "utils", "datasets", "methods")
  left_out <- c(left_out, if (!"package:tfdist" %in% search()) "tfdist")
  list(
    globals = c(used, workspace_functions(except = names(used))),
    packages = setdiff(found$packages, left_out)
  )
}

find_globals <- function(f) {
  found <- globals::globalsOf(
    f,
    envir = environment(f),
    tweak = mark_unpacked,
    mustExist = FALSE,
    recursive = TRUE
  )
  found <- globals::cleanup(found)
  list(
    values = as.list(unclass(found)),
    where = attr(found, "where"),
    packages = globals::packagesOf(found)
  )
}

# Code in which `.[x, y] %<-% data` and `tape() %as% t`, of keras3 and zeallot, assign with `<-`:
# globalsOf() would search for `x`, `y` and `t` in the session.
mark_unpacked <- function(expr) {
  if (is.primitive(expr)) {
    return(expr)
  }
  if (is.function(expr)) {
    body(expr) <- mark_unpacked(body(expr))
    return(expr)
  }
  for (i in seq_along(expr)) {
    if (is.call(expr) && is.call(expr[[i]])) {
      expr[[i]] <- mark_unpacked(expr[[i]])
    }
  }
  operator <- if (rlang::is_call(expr, n = 2L)) rlang::call_name(expr)
  place <- match(operator, c("%<-%", "%<<-%", "%->%", "%as%"))
  if (!length(place) || is.na(place)) {
    return(expr)
  }
  target <- if (place <= 2L) 2L else 3L
  variables <- lapply(all.vars(expr[[target]]), as.name)
  # The operator and the dot still count: their packages are attached on the workers.
  is_dot <- vapply(variables, identical, NA, quote(.))
  assign <- lapply(variables[!is_dot], function(name) call("<-", name, NULL))
  as.call(c(quote(`{`), expr[[5L - target]], expr[[1L]], variables[is_dot], assign))
}

# Functions in lists, in which globalsOf() does not search.
list_functions <- function(values) {
  lists <- Filter(function(value) is_r_list(value), values)
  members <- do.call(c, c(list(list()), lapply(unname(lists), unclass)))
  Filter(function(member) is.function(member) && !is.primitive(member), members)
}

# TRUE for the workspace and for what attach() has added to the search path.
is_workspace <- function(environment) {
  name <- environmentName(environment)
  identical(environment, globalenv()) ||
    (name %in% search() && !startsWith(name, "package:") && name != "Autoloads")
}

workspace_functions <- function(except) {
  names <- setdiff(ls(globalenv()), except)
  names <- names[!vapply(names, bindingIsActive, NA, globalenv())]
  functions <- Filter(
    function(object) is.function(object) && identical(environment(object), globalenv()),
    mget(names, globalenv())
  )
  lapply(functions, utils::removeSource)
}

check_no_python <- function(found, arg) {
  is_pointer <- vapply(found, contains_python, NA)
  if (any(is_pointer)) {
    name <- names(found)[is_pointer][[1L]]
    if (inherits(found[[name]], "python.builtin.type")) {
      abort_python_class(found[[name]]$`__name__`, arg)
    }
    hint <- if (inherits(found[[name]], "python.builtin.module")) {
      module <- tryCatch(found[[name]]$`__name__`, error = function(error) name)
      sprintf("Import it inside the function: `%s <- reticulate::import(\"%s\")`.", name, module)
    } else {
      "Create it inside the function."
    }
    problem <- "`%s` uses `%s`, a Python or Spark object that exists only in this session."
    abort_input(sprintf(problem, arg, name), i = hint)
  }
}

# For example a class of keras3's `new_*_class()`, whose functions hold it under other names.
abort_python_class <- function(class, arg) {
  advice <- "Define the class inside `%s`, or in a Python module that is installed on the workers."
  problem <- "`%s` uses the class `%s`, which exists only in this session: workers cannot get it."
  abort_input(sprintf(problem, arg, class), i = sprintf(advice, arg))
}

contains_python <- function(x) {
  is_session_object <- is_python(x) || inherits(x, c("spark_connection", "tbl_spark"))
  is_session_object || (is.list(x) && any(vapply(unclass(x), contains_python, NA)))
}

# Measured before serializing, which takes minutes for gigabytes.
check_closure_size <- function(f, globals, extra, arg) {
  carried <- c(globals, captured_variables(environment(f)), extra)
  # A missing argument has no size.
  size_of <- function(object) tryCatch(as.double(utils::object.size(object)), error = function(e) 0)
  sizes <- vapply(carried, size_of, 1)
  if (sum(sizes) > max_closure_bytes()) {
    abort_too_large(sum(sizes), sizes, arg)
  }
}

abort_too_large <- function(bytes, sizes, arg) {
  largest <- utils::head(sort(sizes[sizes > sum(sizes) / 100], decreasing = TRUE), 3L)
  named <- sprintf("`%s` (%s MB)", names(largest), format_mb(largest))
  problem <- "`%s` would carry %s MB to every worker; at most %s MB are allowed."
  abort_input(
    sprintf(problem, arg, format_mb(bytes), format_mb(max_closure_bytes())),
    x = if (length(named)) {
      sprintf("The largest variables it captures are %s.", toString(named))
    } else {
      "They are in the environments of functions or objects that it uses."
    },
    i = "Pass rows as `data`, or let the function read them from a file on the workers.",
    i = "Define the function outside of functions that have large variables it does not need.",
    i = "`options(tfdist.max_function_mb = )` allows more."
  )
}

# The variables of a function's environments up to the workspace or a package.
captured_variables <- function(environment) {
  variables <- list()
  while (is_local_environment(environment)) {
    names <- ls(environment, all.names = TRUE)
    # Arguments that were not evaluated yet, and active bindings, are not evaluated here.
    is_value <- !rlang::env_binding_are_lazy(environment, names) &
      !rlang::env_binding_are_active(environment, names)
    variables <- c(variables, mget(names[is_value], environment))
    environment <- parent.env(environment)
  }
  variables
}

is_local_environment <- function(environment) {
  !identical(environment, globalenv()) &&
    !identical(environment, emptyenv()) &&
    !identical(environment, baseenv()) &&
    !isNamespace(environment) &&
    is.null(attr(environment, "name"))
}

format_mb <- function(bytes) format_number(round(bytes / 2^20))
