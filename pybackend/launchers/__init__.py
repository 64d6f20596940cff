"""Ways to start the workers of a job: on this machine, or in the tasks of a Spark job."""
