"""Starts ranks; `paceline.launch` is `local.launch`."""
