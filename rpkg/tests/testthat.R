library(testthat)
library(tfdist)

test_check("tfdist")
