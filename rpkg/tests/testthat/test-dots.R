test_that("arguments of keras3's that have another form here say what to pass", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    barrier_train("local", model, x = x, y = y)
    barrier_train("local", model, rows, sample_weight = weights)
    barrier_train("local", model, rows, validation_data = rows, validation_steps = 3)
    barrier_train("local", model, rows, validation_data = rows, validation_batch_size = 64)
    barrier_train("local", model, generator = batches)
    barrier_train("local", model, rows, view_metrics = FALSE)
    barrier_train("local", model, rows, optimizer = "adam")
    barrier_evaluate("local", model, rows, steps = 10)
  })
})

test_that("misspelt arguments, those of option objects, others and values without a name are told", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    barrier_train("local", model, rows, batchsize = 64)
    barrier_train("local", model, rows, validation = rows)
    barrier_train("local", model, rows, loss_over = "global batch")
    barrier_train("local", model, rows, gpus = 1)
    barrier_predict("local", model, x, units = 3)
    barrier_train("local", model, rows, NULL, 10)
    do.call(barrier_train, list("local", epoch = 2))
  })
  takes_dots <- function(...) check_dots_empty(...)
  expect_null(takes_dots())
})

test_that("arguments without a default are asked for by name", {
  fit <- example_fit()
  expect_snapshot(error = TRUE, {
    barrier_train(data = iris)
    barrier_predict("local", fit)
    predict(fit)
    deploy_model(fit)
    to_sql(fit)
    augment_sql()
    read_tfrecords(path = "a")
    write_model(fit)
    generics::augment(fit)
  })
})
