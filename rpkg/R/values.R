# R values as JSON text: a worker returns only data, and reading it runs no code, as unserialize()
# might. Numbers are sent as bytes, so they are not rounded.

# Sent to the workers with the function whose value it packs, so it uses nothing of this package.
pack_value <- function(value) {
  reject <- function(where, what) {
    stop(
      where,
      " is ",
      what,
      ", which cannot be sent back: return vectors, lists and data frames, and ",
      "a Keras model as reticulate::import(\"pybackend\")$model_to_base64(model)",
      call. = FALSE
    )
  }
  bytes <- function(x) jsonlite::base64_enc(writeBin(x, raw(), endian = "little"))
  text <- function(x, where) {
    if (any(Encoding(x) == "unknown" & !validUTF8(x), na.rm = TRUE)) {
      reject(where, "text that is not valid UTF-8")
    }
    x <- enc2utf8(x)
    I(x)
  }
  content <- function(x, where) {
    switch(
      typeof(x),
      "NULL" = list(),
      logical = bytes(as.integer(x)),
      integer = ,
      double = ,
      complex = bytes(x),
      raw = jsonlite::base64_enc(x),
      character = text(x, where),
      list = lapply(seq_along(x), function(i) pack(x[[i]], sprintf("%s[[%d]]", where, i))),
      reject(where, paste("of type", typeof(x)))
    )
  }
  pack <- function(x, where) {
    if (inherits(x, "python.builtin.object")) {
      reject(where, "a Python object")
    }
    if (isS4(x)) {
      reject(where, "an S4 object")
    }
    kept <- attributes(x)
    # data.table stores a pointer of its process in an attribute.
    kept <- kept[!vapply(kept, typeof, "") %in% "externalptr"]
    if (is.atomic(x) || is.list(x)) {
      # A class may have its own methods for the functions used below.
      attributes(x) <- NULL
    }
    packed <- list(type = typeof(x), data = content(x, where))
    if (length(kept)) {
      named <- function(attribute, name) {
        pack(attribute, sprintf("attribute \"%s\" of %s", name, where))
      }
      packed$attributes <- Map(named, kept, names(kept))
    }
    packed
  }
  if (utils::object.size(value) >= 2^31) {
    stop("the result is larger than 2 GiB: write it to a file that all hosts share", call. = FALSE)
  }
  packed <- jsonlite::toJSON(pack(value, "the result"), auto_unbox = TRUE, na = "null")
  enc2utf8(as.character(packed))
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
    rows <- attr(value, "row.names")
    if (is.integer(rows) && identical(rows, seq_along(rows))) {
      # The form in which R stores automatic row names.
      attr(value, "row.names") <- .set_row_names(length(rows))
    }
  }
  value
}

unpack_numbers <- function(type, bytes) {
  size <- c(logical = 4L, integer = 4L, double = 8L, complex = 16L, raw = 1L)[[type]]
  kind <- if (type == "logical") "integer" else type
  numbers <- readBin(bytes, kind, n = length(bytes) / size, endian = "little")
  if (type == "logical") as.logical(numbers) else numbers
}
