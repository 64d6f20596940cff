"""A job: what every worker is to do, and what each reports."""
