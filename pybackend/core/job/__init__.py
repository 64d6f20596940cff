"""Description of a job, its options, and the messages and reports from its workers."""
