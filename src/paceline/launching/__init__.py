"""Starts ranks: for a script (`run.py`), and for a function (`local.py`, which is `paceline.launch`)."""
