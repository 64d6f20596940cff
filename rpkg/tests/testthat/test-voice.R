# Messages of the Python half, with values filled in.
messages <- c(
  "the model is not compiled: call `compile()` first",
  "workers=8, but a:2,b:1 has 3 slots: use workers=3, or give hosts more slots",
  "there are checkpoints at '/runs/1' already (epoch-3): give resume=True to go on from the newest one, or name another folder in `checkpoint`",
  "`checkpoint` with a function `data` needs every='epoch': only the beginning of an epoch can be found again in a pipeline",
  "`class_weight` must map classes to weights, e.g. {0: 1.0, 1: 5.0}, not {'a': [1, 2], 'b c': None}",
  "`data` must be a Spark DataFrame, an RDD, a pandas data frame or a dict of arrays, not list",
  "`spark` must be None, 'local', a SparkSession, or made by hosts(), slurm() or kubernetes(), not 3.5",
  "`scale_lr` and `LocalSteps` exclude each other: a local step has the rows of one worker",
  "`roles` must have a chief, workers and parameter servers, e.g. {'chief': 1, 'worker': 2, 'ps': 1}, not []",
  "the model has the inputs a, b: say which columns each is fed with, as features={'a': ['x', 'y'], 'b': [...]}",
  "the rows have shape (784,), but the model's input 'pixels' has shape (None, 28, 28)",
  "repartition=False, but the DataFrame has 4 partitions, not workers=2: use workers=4, or df.repartition(2)",
  "the loss 'mse' has reduction='sum': workers average gradients by their rows, so use reduction='sum_over_batch_size', or give `exchange` the option loss_over='global batch'",
  "each worker is to have 2 gpus (resources=Resources(gpus=2)), but a task of this Spark session has 1: start the session with spark.task.resource.gpu.amount=2",
  "`overwrite` must be True or False, not None",
  "`labels` of the pods must be like [{\"key\": \"gpu\", \"operator\": \"Exists\"}], not None"
)

test_that("messages of the Python half are in R's words", {
  expect_snapshot(writeLines(strwrap(vapply(messages, say_in_r, "", USE.NAMES = FALSE), 98, exdent = 2)))
})

test_that("what stands in quotes is the user's, and so are addresses and other programs' options", {
  for (text in c(
    "there is no file 'workers=2 None.csv' at \"/a/{'b': True}/DataFrame\"",
    "the workers' weights of Keras's layer 'None' differ",
    "worker 1 lost [fd77::10]:8080",
    "set MASTER_ADDR, e.g. mpirun -x MASTER_PORT=29500 --workers=3",
    "read https://host/x?workers=2&resume=True.csv"
  )) {
    expect_identical(say_in_r(sub("True.csv", "1", text)), sub("True.csv", "1", text))
  }
})

test_that("tracebacks, logs and the words of the user's code stay as they are", {
  message <- paste(
    sep = "\n\n",
    "worker 1 on node failed: ValueError: None is not a batch, workers=2",
    "Traceback of worker 1:\n  fit(workers=2)",
    "  resume=True",
    "Last lines printed by worker 1:\n  True",
    "What to do: give resume=True"
  )
  expect_identical(
    say_failure_in_r(message, "ValueError"),
    sub("give resume=True", "give resume = TRUE", message)
  )
  ours <- sub("ValueError: None is not a batch", "InputError: `data` is None", message)
  said <- strsplit(say_failure_in_r(ours, "InputError"), "\n\n")[[1]]
  expect_identical(said[[1]], "worker 1 on node failed: `data` is NULL, workers = 2")
  expect_identical(said[2:4], strsplit(message, "\n\n")[[1]][2:4])
})

test_that("an error of the Python half arrives in R's words", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    call_python(pybackend()$Resources, memory = "much")
    call_python(pybackend()$LocalSteps, 0)
    call_python(pybackend()$kubernetes, NULL)
    call_python(pybackend()$hosts, list(a = 1))
  })
})
