"""Records of training runs in MLflow and Weights & Biases."""
