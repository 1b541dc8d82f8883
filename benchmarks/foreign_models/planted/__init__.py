"""Faults planted into foreign models, by kind; `table.py` lists all of them."""
