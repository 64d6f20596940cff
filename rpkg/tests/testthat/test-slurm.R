test_that("wrong settings of Slurm are errors", {
  skip_if_no_pybackend()
  expect_snapshot(error = TRUE, {
    slurm(nodes = 0)
    slurm("gpu", "2:00:00")
    slurm(options = "exclusive")
    slurm(time = "bad")
    slurm(options = list("-n" = 4))
    slurm(options = list(ntasks = 4))
    slurm(options = list(qos = "a\nb"))
    slurm(partition = "a\nb")
  })
  expect_error(slurm(patience = -1), class = "tfdist_error_input")
})

test_that("Python takes what R has made", {
  skip_if_no_pybackend()
  made <- slurm("gpu", time = 90, nodes = 2, options = list(account = "physics", nice = 10))
  launcher <- open_session(check_sc(made))
  expect_identical(launcher$settings$time, "90")
  expect_identical(launcher$settings$options, list(account = "physics", nice = "10"))
  expect_identical(launcher$count_workers(NULL), 2L)
  for (time in c("90", "1:30", "1:30:00", "2-12", "2-12:00")) {
    expect_identical(open_session(check_sc(slurm(time = time)))$settings$time, time)
  }
})
