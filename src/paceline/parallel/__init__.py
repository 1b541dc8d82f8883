"""Changes a model so that many ranks train it as one."""
