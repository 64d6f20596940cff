"""The audit: some steps are repeated in one process and compared. Start with `auditor.py`."""
