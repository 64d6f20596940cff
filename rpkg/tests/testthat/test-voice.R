# Python's messages with example values.
messages <- readLines(test_path("python-messages.txt"))

test_that("messages of the Python half are in R's words", {
  expect_snapshot(writeLines(strwrap(
    vapply(messages, say_in_r, "", USE.NAMES = FALSE),
    98,
    exdent = 2
  )))
})

test_that("what stands in quotes is the user's, and so are addresses and other programs' options", {
  for (text in c(
    "there is no file 'workers=2 None.csv' at \"/a/{'b': True}/DataFrame\"",
    "the workers' weights of Keras's layer 'None' differ",
    "/data/DataFrame/None.csv is not a file, nor is s3://b/True/x=1, of the workers' None of them",
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

test_that("of a failure in R, and of other workers, only the name of Python's class is left out", {
  message <- paste(
    sep = "\n\n",
    "worker 0 on a failed: RError: object 'None' not found, workers=2",
    "Other workers:\n  worker 1 on b: PeerLostError: lost worker 0\n  worker 2 on c: KeyError: 1"
  )
  expect_identical(
    say_failure_in_r(message, "RError"),
    gsub("(RError|PeerLostError): ", "", message)
  )
})

test_that("rows are counted from 1", {
  expect_identical(
    say_in_r("column 'row 1 (counting from 0)' holds a NaN in row 9 (counting from 0) of 'x'"),
    "column 'row 1 (counting from 0)' holds a NaN in row 10 of 'x'"
  )
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
