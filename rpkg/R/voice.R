# Python's errors in R's spelling: `workers = 2` for workers=2, `NULL` for None, and `local_steps()`
# for LocalSteps. Only the text of tfdist itself is changed; quoted texts, paths, tracebacks and
# logs are not.

# Paragraphs that quote others, and the one after them that is tfdist's own again.
verbatim_paragraphs <- paste0(
  "^(Traceback of worker [0-9]+:|Last lines printed by worker [0-9]+:|Other workers:",
  "|Spark's message:|sparklyr's message:)"
)
own_paragraph <- "^What to do: "

# Regular expressions, in the order in which they apply. Quoted texts are hidden meanwhile.
phrases <- c(
  # R's names.
  "\\b(pybackend\\.)?Checkpoint\\b(?!\\()" = "`checkpoint()`",
  "\\b(pybackend\\.)?Checkpoint\\(" = "checkpoint(",
  "`?\\b(pybackend\\.)?LocalSteps\\b`?(?!\\()" = "`local_steps()`",
  "\\b(pybackend\\.)?LocalSteps\\(" = "local_steps(",
  "`?\\b(pybackend\\.)?ScaleLearningRate\\b`?(?!\\()" = "`scale_learning_rate()`",
  "\\b(pybackend\\.)?ScaleLearningRate\\(" = "scale_learning_rate(",
  "\\b(pybackend\\.)?(Exchange)\\(" = "exchange(",
  "\\b(pybackend\\.)?DataOptions\\(" = "data_options(",
  "`?\\b(pybackend\\.)?Elastic\\b`?(?!\\()" = "`elastic()`",
  "\\b(pybackend\\.)?Elastic\\(" = "elastic(",
  "`?\\b(pybackend\\.)?ParameterServer\\b`?(?!\\()" = "`parameter_server()`",
  "\\b(pybackend\\.)?ParameterServer\\(" = "parameter_server(",
  "\\ba Resources\\b" = "made by `resources()`",
  "\\b(pybackend\\.)?Resources\\(" = "resources(",
  "\\ba TrainResult\\b" = "the result of a training run",
  "\\bbarrier_run\\b" = "barrier_apply",
  "\\(df\\.sparkSession, model, df, " = "(sc, model, data, ",
  "\\(df\\.sparkSession, fn, data=df\\)" = "(sc, f, data = data)",
  "\\ba DataOptions\\b" = "made by `data_options()`",
  "\\blambda: " = "function() ",
  "\\bpandas\\.read_csv\\(" = "utils::read.csv(",
  "\\bspark\\.read\\.csv\\(([^,]*), header=True\\)" = "sparklyr::spark_read_csv(sc, path = \\1)",
  "\\bdf\\.write\\.saveAsTable\\(name\\)" = "sparklyr::spark_write_table(data, name)",
  "`session\\.stop\\(\\)`" = "`sparklyr::spark_disconnect_all()`",
  "`spark`" = "`sc`",
  "\\bpredict_spark\\(" = "predict(",
  "\\b(is|are) a Spark DataFrame\\b" = "\\1 a Spark table",
  "\\bSpark DataFrames\\b" = "Spark tables",
  "\\b(a )?Spark DataFrame\\b" = "\\1Spark table",
  "\\bpandas (or polars )?(data frame|DataFrame)" = "data frame",
  "\\bDataFrames\\b" = "Spark tables",
  "\\bDataFrame\\b" = "Spark table",
  "\\bdf\\.repartition\\(([0-9]+)\\)" = "sparklyr::sdf_repartition(data, \\1)",
  "\\bdata\\.take\\(([0-9]+)\\)" = "its first \\1 batches",
  "\\bmodel\\.predict\\(\\)" = "`predict()`",
  "\\bmodel\\.save\\b" = "write_model()",
  "\\bresult\\.save\\(" = "write_model(fit, ",
  "\\bload_model\\(path\\)" = "keras3::load_model(path)",
  " of trainOptions\\b" = "",
  "\\bkeras\\.callbacks\\.Callback\\b" = "callback of keras3",
  "\\bkeras\\.losses\\.MeanSquaredError\\(\\)" = "keras3::loss_mean_squared_error()",
  "\\bSparseCategoricalCrossentropy\\b(?!\\()" = "`loss_sparse_categorical_crossentropy()`",
  "\\bCategoricalCrossentropy\\b(?!\\()" = "`loss_categorical_crossentropy()`",
  "\\bkeras\\.Sequential\\b" = "keras_model_sequential()",
  "\\bkeras\\.Model\\(inputs, outputs\\)" = "keras_model()",
  "\\bpass labels\\.argmax\\(axis=1\\)" = "pass `max.col(labels) - 1`",
  "\\ba dict of\\b" = "a named list of",
  "\\(x, y(, sample_weight)?\\)" = "list(x, y\\1)",
  # Values. Tuples of numbers are shapes, where R has NA for any length.
  "(?<=[(, ])None(?=,( None|[ 0-9]*[0-9]|\\)))|(?<=[0-9], )None(?=\\))" = "NA",
  "\\(([0-9]+|NA|None),\\)" = "(\\1)",
  "\\bTrue\\b" = "TRUE",
  "\\bFalse\\b" = "FALSE",
  "\\bNone\\b(?! of\\b)" = "NULL"
)

say_in_r <- function(message) {
  paragraphs <- strsplit(message, "\n\n", fixed = TRUE)[[1L]]
  is_own <- TRUE
  for (place in seq_along(paragraphs)) {
    if (grepl(verbatim_paragraphs, paragraphs[[place]])) {
      is_own <- FALSE
    } else if (grepl(own_paragraph, paragraphs[[place]])) {
      is_own <- TRUE
    }
    if (is_own) {
      paragraphs[[place]] <- translate(paragraphs[[place]])
    }
  }
  paste(paragraphs, collapse = "\n\n")
}

# "worker 1 on node failed: InputError: `data` ...": without the class if tfdist raised the error.
# If not, the text is that of the training code or of another package.
say_failure_in_r <- function(message, exception_type) {
  message <- drop_own_classes(message)
  if (exception_type %in% names(condition_classes)) {
    return(say_in_r(message))
  }
  paragraphs <- strsplit(message, "\n\n", fixed = TRUE)[[1L]]
  advice <- grepl(own_paragraph, paragraphs) & seq_along(paragraphs) == length(paragraphs)
  for (place in which(advice)) {
    paragraphs[[place]] <- translate(paragraphs[[place]])
  }
  paste(paragraphs, collapse = "\n\n")
}

# In the first line, and in those of the other workers.
drop_own_classes <- function(message) {
  own <- paste(c(names(condition_classes), "RError"), collapse = "|")
  message <- sub(sprintf("^(worker [0-9]+ on \\S+ failed: )(%s): ", own), "\\1", message)
  parts <- strsplit(message, "\n\nOther workers:\n", fixed = TRUE)[[1L]]
  if (length(parts) != 2L) {
    return(message)
  }
  line <- sprintf("(?m)^(  worker [0-9]+ on \\S+: )(%s): ", own)
  parts[[2L]] <- gsub(line, "\\1", parts[[2L]], perl = TRUE)
  paste(parts, collapse = "\n\nOther workers:\n")
}

translate <- function(text) {
  if (!validUTF8(text)) {
    return(text)
  }
  installed <- 'run `install_tfdist(extras = c("cpu", "\\1"))`'
  text <- gsub("pip install 'tfdist\\[(\\w+)\\]'", installed, text, perl = TRUE)
  quoted <- hide_quoted(text)
  text <- quoted$text
  for (pattern in names(phrases)) {
    text <- gsub(pattern, phrases[[pattern]], text, perl = TRUE)
  }
  text <- count_from_one(text)
  text <- name_arguments(text)
  text <- translate_literals(text)
  show_quoted(text, quoted$texts)
}

# Rows have numbers from 1 in R.
count_from_one <- function(text) {
  found <- gregexpr("\\brow [0-9]+ \\(counting from 0\\)", text)
  regmatches(text, found) <- lapply(regmatches(text, found), function(rows) {
    sprintf("row %.0f", as.numeric(sub("^row ([0-9]+) .*", "\\1", rows)) + 1)
  })
  text
}

# A quote opens after a blank or a bracket: the apostrophe of "Keras's" or "workers'" does not.
quoted_pattern <- paste(
  "(?<![\\w\\\\])'(?:[^'\\\\\n]|\\\\.|(?<=\\w)'(?=\\w))*'(?!\\w)",
  "(?<![\\w\\\\])\"(?:[^\"\\\\\n]|\\\\.)*\"(?!\\w)",
  # A path or URI, even without quotes.
  "(?<![^\\s(=])(?:[a-z][a-z0-9+.-]*:/|~)?/[^\\s,;)]+",
  sep = "|"
)

# Quoted texts, as \001, their places, and \002.
hide_quoted <- function(text) {
  found <- gregexpr(quoted_pattern, text, perl = TRUE)
  texts <- regmatches(text, found)[[1L]]
  regmatches(text, found) <- list(sprintf("\001%s\002", seq_along(texts)))
  list(text = text, texts = texts)
}

show_quoted <- function(text, texts) {
  hidden <- text
  for (place in seq_along(texts)) {
    mark <- sprintf("\001%d\002", place)
    inside <- substr(texts[[place]], 2L, nchar(texts[[place]]) - 1L)
    is_name <- grepl(paste0(mark, " ="), hidden, fixed = TRUE)
    # R users write double quotes where a text is an argument's value or an entry.
    is_value <- grepl(sprintf("(= |\\()(\001[0-9]+\002, )*%s", mark), hidden, perl = TRUE)
    shown <- if (is_name) {
      as_name(inside)
    } else if (is_value && grepl("^'[^\"\\\\]*$", texts[[place]])) {
      sprintf("\"%s\"", inside)
    } else {
      texts[[place]]
    }
    text <- sub(mark, shown, text, fixed = TRUE)
  }
  text
}

as_name <- function(text) if (make.names(text) == text) text else sprintf("`%s`", text)

# `name=value` of the arguments that R users write.
name_arguments <- function(text) {
  pattern <- sprintf("(?<![-.\\w/?&:$])(%s)=(?=[^=\\s])", paste(argument_names(), collapse = "|"))
  gsub(pattern, "\\1 = ", text, perl = TRUE)
}

argument_names <- function() {
  functions <- mget(getNamespaceExports("tfdist"), asNamespace("tfdist"), mode = "function")
  own <- unlist(lapply(functions, function(f) names(formals(f))))
  of_keras <- c("reduction", "run_eagerly", "stateful", "synchronized", "use_ema", "units")
  setdiff(unique(c(own, of_keras)), c("...", "x", "f"))
}

# {'a': 1} is list(a = 1), and ['a', 'b'] is c("a", "b"); the innermost first.
translate_literals <- function(text) {
  item <- paste0(
    "(?:\001[0-9]+\002|-?[0-9.]+(?:e-?[0-9]+)?|TRUE|FALSE|NULL|NA|\\.{3}",
    "|(?:list|c)\\([^\\[\\]{}]*\\))"
  )
  entry <- sprintf("(?:\001[0-9]+\002|[0-9]+): %s", item)
  list_of <- function(part) sprintf("(?:%s(?:, %s)*)?", part, part)
  pattern <- sprintf("\\{%s\\}|(?<![\\w\\])\002])\\[%s\\]", list_of(entry), list_of(item))
  repeat {
    found <- regmatches(text, regexpr(pattern, text, perl = TRUE))
    if (!length(found)) {
      return(text)
    }
    inside <- substr(found, 2L, nchar(found) - 1L)
    inside <- gsub("\\b([0-9]+): ", "\"\\1\" = ", gsub("\002: ", "\002 = ", inside), perl = TRUE)
    is_vector <- startsWith(found, "[") && nzchar(inside) && !grepl("list(", inside, fixed = TRUE)
    text <- sub(
      found,
      sprintf("%s(%s)", if (is_vector) "c" else "list", inside),
      text,
      fixed = TRUE
    )
  }
}
