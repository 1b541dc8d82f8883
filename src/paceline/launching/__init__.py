"""Starts ranks: for a script (`run_script.py`), and for a function (`local.py`: `paceline.launch`)."""
