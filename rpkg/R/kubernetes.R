#' Run workers on a Kubernetes cluster
#'
#' Value for the `sc` argument of [barrier_train()], [barrier_evaluate()], [barrier_predict()],
#' [barrier_apply()] and [train_mnist()]. Each call creates a Job with one pod per worker, shows
#' what the pods are waiting for, and deletes the Job at the end, even after an interrupt. This
#' session reaches the pods only through the cluster's API server.
#'
#' @param image Container image with TensorFlow and the same Python release as this session. If
#'   [resources()] has an `environment`, any image with Python 3.9 or later, `tar` and a C library
#'   that fits.
#' @param ... Must be empty: the arguments that follow must be named.
#' @param namespace,context Namespace and context. `NULL` (default): those that `kubectl` uses.
#' @param cpus,memory,gpus Resources for each worker, such as `4` or `"500m"`, `"8Gi"` and `1`.
#' @param node_selector Labels of the nodes that may run workers, as a named vector.
#' @param tolerations Taints to tolerate, as a list of named lists.
#' @param secrets Names of Secrets whose keys become environment variables in the workers.
#' @param service_account Service account for the pods.
#' @param image_pull_secrets Names of Secrets that nodes use to pull the image.
#' @param time_limit Seconds after which Kubernetes terminates the Job. `NULL` (default): a week.
#' @param ttl Seconds after which Kubernetes deletes a finished Job that this session could not
#'   delete. `NULL` (default): 300.
#' @param python Path to Python in the image, or a command that starts it. `NULL` (default):
#'   `"python3"`.
#' @param labels Additional labels for the Job, its pods and the Service, as a named vector.
#' @param patience Seconds to wait until all pods are running. `NULL` (default): 600.
#'
#' @return An object for the `sc` argument. Invalid arguments raise an error of class
#'   `tfdist_error_input`.
#' @export
#' @examples
#' kubernetes("registry/tf:1", cpus = 4, memory = "8Gi")
#' \dontrun{
#' fit <- train_mnist(kubernetes("registry/tf:1", gpus = 1), workers = 4)
#' }
kubernetes <- new_maker("kubernetes", "launcher")
