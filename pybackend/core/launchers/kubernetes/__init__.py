"""Workers as the pods of a Kubernetes Job."""
