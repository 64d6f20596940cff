# usage: Rscript scripts/r-site.R FOLDER
# Writes the reference and the news to FOLDER/pkgdown; the site replaces the
# theme of pkgdown. Functions in the pages of FOLDER/vignettes become links.
folder <- commandArgs(trailingOnly = TRUE)
destination <- file.path(normalizePath(folder), "pkgdown")

# pkgdown downloads its theme's scripts, unless the site seems to exist already.
dir.create(file.path(destination, "deps"), recursive = TRUE)
invisible(file.create(file.path(
  destination,
  c("pkgdown.yml", "deps/data-deps.txt")
)))

site <- pkgdown::as_pkgdown("rpkg", override = list(destination = destination))
topics <- site$topics
grouped <- unlist(lapply(site$meta$reference, `[[`, "contents"))
is_grouped <- topics$internal |
  topics$name %in% grouped |
  vapply(topics$alias, \(names) any(names %in% grouped), logical(1))
more <- topics$name[!is_grouped]
if (length(more) > 0) {
  message("Without a group in rpkg/_pkgdown.yml: ", toString(more))
  rest <- list(title = "More", contents = more)
  site$meta$reference <- c(site$meta$reference, list(rest))
}
pkgdown::build_reference(site, examples = FALSE, lazy = FALSE)
pkgdown::build_news(site)

# Functions of tfdist link to its reference, and others to their packages'.
options(
  downlit.package = "tfdist",
  downlit.topic_index = setNames(topics$name, topics$name),
  downlit.topic_path = "../reference/",
  downlit.article_path = "../articles/"
)
for (page in Sys.glob(file.path(folder, "vignettes", "*.html"))) {
  downlit::downlit_html_path(page, page)
}
