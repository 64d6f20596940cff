#' Load the MNIST images
#'
#' 60,000 training images and 10,000 test images of handwritten digits, each 28 x 28 pixels. They
#' come from the first of these sources that is set or available: `path`, the file that the
#' environment variable `TFDIST_MNIST` specifies, Keras's cache, or a download. If none of them is
#' available, a few thousand images included in this package are used instead, with a message.
#'
#' @param path Path to a file in the format of Keras's `mnist.npz`, or `NULL`.
#' @param limit Maximum number of training images and of test images. The first ones are used.
#'   `NULL` (default): all.
#' @return A list: `x_train` and `x_test`, integer arrays of shape images x 28 x 28 with gray values
#'   from 0 to 255; `y_train` and `y_test`, the digits; `source`, where the images came from;
#'   `subset`, `TRUE` if only the images included in the package were available. The full set takes
#'   up 220 MB as R integers.
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' digits <- mnist(limit = 100)
#' dim(digits$x_train)
#' image(t(digits$x_train[1, 28:1, ]), col = grey.colors(255), main = digits$y_train[1])
mnist <- function(path = NULL, limit = NULL) {
  check_string(path, allow_null = TRUE)
  limit <- check_count(limit, allow_null = TRUE)
  found <- call_python(pybackend()$mnist, path, limit = limit)
  if (isTRUE(found$subset)) {
    text <- "The full MNIST was not found; using the images that come with tfdist."
    rlang::inform(text, class = "tfdist_message_subset")
  }
  as_labels <- function(y) as.integer(as.vector(y))
  list(
    x_train = found$x_train,
    y_train = as_labels(found$y_train),
    x_test = found$x_test,
    y_test = as_labels(found$y_test),
    source = as.character(found$source),
    subset = found$subset
  )
}

#' Train a first network on MNIST
#'
#' Trains a small convolutional network on the handwritten digits of [mnist()] and evaluates it on
#' the test images. It needs no preparation: without a network connection, it uses the images
#' included in this package.
#'
#' @inheritParams barrier_train
#' @param workers Number of workers. `NULL`: 3, or the number of sessions that join (see
#'   [join_workers()]).
#' @param path,limit See [mnist()].
#' @return A [tfdist_fit] object whose `metrics` are `test_loss` and `test_accuracy`.
#' @export
#' @examplesIf tfdist::tfdist_sitrep(quiet = TRUE)$ready
#' fit <- train_mnist("local", workers = 2, epochs = 1, limit = 640)
#' fit$metrics
train_mnist <- take_options(
  function(
    sc = "local",
    workers = getOption("tfdist.workers"),
    ...,
    epochs = 3,
    batch_size = 64,
    path = NULL,
    limit = NULL,
    seed = 1
  ) {
    check_dots_empty(...)
    route <- check_sc(sc)
    check_string(path, allow_null = TRUE)
    limit <- check_count(limit, allow_null = TRUE)
    settings <- c("workers", "epochs", "batch_size", "callbacks", "seed")
    settings <- check_arguments(c(settings, "resources", "recovery", "verbose"))
    plain <- c(list(path = path, limit = limit), as_python_settings(settings))
    result <- call_python(pybackend()$train_mnist, open_session(route), !!!plain)
    record_training(new_fit(result, list(levels = as.character(0:9)), settings))
  },
  c("callbacks", "resources", "recovery", "verbose")
)
