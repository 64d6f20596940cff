# Installs missing packages into .rlib: those in rpkg/DESCRIPTION and those that
# `make test` uses; from TFDIST_CRAN if set, otherwise from R's own
# repositories.
for_make <- c("lintr", "pkgdown", "rcmdcheck", "roxygen2")
# Only tests need these: DESCRIPTION names packages that tfdist itself calls.
for_tests <- c("base64enc", "keras", "pysparklyr")

library_path <- normalizePath(Sys.getenv("R_LIBS"), mustWork = TRUE)
prebuilt <- Sys.getenv("TFDIST_CRAN")
repositories <- getOption("repos")
if (nzchar(prebuilt)) {
  repositories <- c(CRAN = prebuilt)
} else if (identical(unname(repositories["CRAN"]), "@CRAN@")) {
  # The first mirror in R's own list forwards to a mirror nearby.
  utils::chooseCRANmirror(graphics = FALSE, ind = 1)
  repositories <- getOption("repos")
}

description <- read.dcf("rpkg/DESCRIPTION", c("Imports", "Suggests"))
entries <- unlist(strsplit(description[!is.na(description)], ","))
named <- trimws(sub("[(].*", "", entries))
minimum <- sub(".*>=\\s*([0-9.-]+).*|.*", "\\1", entries)

base <- rownames(utils::installed.packages(priority = "base"))
have <- utils::installed.packages(lib.loc = library_path)[, "Version"]
old <- named[named %in% names(have) & nzchar(minimum)]
too_old <- Filter(
  \(p) utils::compareVersion(have[[p]], minimum[[match(p, named)]]) < 0,
  old
)
needed <- c(named, for_make, for_tests)
wanted <- setdiff(needed, c(base, setdiff(names(have), too_old)))
if (length(wanted) == 0) {
  quit(status = 0)
}

message("R packages into .rlib: ", paste(wanted, collapse = ", "))
libraries <- if (nzchar(prebuilt)) "r-binary" else "r-source"
if (system2("scripts/apt-install.sh", libraries) != 0) {
  quit(status = 1)
}
cores <- max(1L, parallel::detectCores(), na.rm = TRUE)
utils::install.packages(
  wanted,
  lib = library_path,
  repos = repositories,
  Ncpus = cores,
  quiet = TRUE
)
installed <- rownames(utils::installed.packages(lib.loc = library_path))
failed <- setdiff(wanted, installed)
if (length(failed) > 0) {
  stop("not installed: ", paste(failed, collapse = ", "), call. = FALSE)
}
