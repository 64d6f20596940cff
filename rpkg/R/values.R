# Values of R as JSON text: what a worker returns is data alone, and reading it back runs no code,
# which unserialize() might. Numbers travel as their bytes, so that none is rounded.

# Goes to the workers with the function whose value it packs, so it uses nothing of this package.
pack_value <- function(value) {
  bytes <- function(x) jsonlite::base64_enc(writeBin(x, raw(), endian = "little"))
  pack <- function(x, where) {
    is_python <- inherits(x, "python.builtin.object")
    type <- typeof(x)
    data <- switch(
      if (is_python) "Python" else type,
      "NULL" = list(),
      logical = bytes(as.integer(x)),
      integer = bytes(as.integer(x)),
      double = bytes(as.double(x)),
      complex = bytes(as.complex(x)),
      raw = jsonlite::base64_enc(as.raw(x)),
      character = I(enc2utf8(as.character(x))),
      list = lapply(seq_along(x), function(i) pack(.subset2(x, i), sprintf("%s[[%d]]", where, i))),
      stop(
        where,
        " is ",
        if (is_python) "a Python object" else paste("of type", type),
        ", which does not travel: return vectors, lists and data frames, and ",
        " a Keras model as reticulate::import(\"pybackend\")$model_to_base64(model)",
        call. = FALSE
      )
    )
    packed <- list(type = type, data = data)
    if (!is.null(attributes(x))) {
      packed$attributes <- Map(
        function(attribute, name) pack(attribute, sprintf("attribute \"%s\" of %s", name, where)),
        attributes(x),
        names(attributes(x))
      )
    }
    packed
  }
  text <- jsonlite::toJSON(pack(value, "the result"), auto_unbox = TRUE, na = "null")
  enc2utf8(as.character(text))
}

unpack_value <- function(text) {
  unpack_node(jsonlite::parse_json(text))
}

unpack_node <- function(node) {
  value <- if (node$type == "list") {
    lapply(node$data, unpack_node)
  } else if (node$type == "character") {
    vapply(node$data, function(text) text %||% NA_character_, "")
  } else if (node$type != "NULL") {
    unpack_numbers(node$type, jsonlite::base64_dec(node$data))
  }
  if (length(node$attributes)) {
    attributes(value) <- lapply(node$attributes, unpack_node)
  }
  value
}

unpack_numbers <- function(type, bytes) {
  size <- c(logical = 4L, integer = 4L, double = 8L, complex = 16L, raw = 1L)[[type]]
  kind <- if (type == "logical") "integer" else type
  numbers <- readBin(bytes, kind, n = length(bytes) / size, endian = "little")
  if (type == "logical") as.logical(numbers) else numbers
}
