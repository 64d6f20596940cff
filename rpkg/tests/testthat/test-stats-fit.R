test_that("fitted values, residuals and the number of rows are those of the training", {
  skip_if_no_pybackend()
  keras <- reticulate::import("keras")
  linear <- function(units) {
    layers <- list(keras$Input(reticulate::tuple(1L)), keras$layers$Dense(units))
    model <- keras$Sequential(layers)
    model$compile("sgd", "mse")
    model
  }
  cars <- mtcars
  fit <- barrier_train("local", linear(1L), cars, log(mpg) ~ wt, workers = 1, verbose = 0)
  expect_identical(nobs(fit), 32L)
  expect_identical(formula(fit), log(mpg) ~ wt)
  expect_identical(fitted(fit), predict(fit, mtcars)$.pred)
  expect_equal(residuals(fit), log(mtcars$mpg) - fitted(fit), ignore_attr = TRUE)
  expect_identical(residuals(fit, mtcars[1:3, ]), residuals(fit)[1:3])

  pair <- list(as.matrix(cars["wt"]), as.matrix(cars[c("mpg", "hp")]))
  fit <- barrier_train("local", linear(2L), pair, workers = 1, verbose = 0)
  expect_identical(dim(fitted(fit)), c(32L, 2L))
  expect_equal(residuals(fit), pair[[2]] - fitted(fit))
  rm(pair)
  expect_error(fitted(fit), "`data` of the training was `pair`, which does not exist here")
})

test_that("generics without an answer say so, and what has it", {
  fit <- example_fit()
  expect_snapshot(error = TRUE, {
    coef(fit)
    confint(fit)
    vcov(fit)
    AIC(fit)
    BIC(fit)
    logLik(fit)
    anova(fit)
    deviance(fit)
    terms(fit)
    model.frame(fit)
    formula(fit)
    fitted(fit)
    residuals(fit, 1:3)
    residuals(fit, list(1:3, factor(1:3)))
  })
})
