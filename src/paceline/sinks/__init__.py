"""Sends a run's metrics to other programs: CSV, TensorBoard, Weights & Biases, MLflow, or one's own sink."""
