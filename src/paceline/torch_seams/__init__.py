"""Use the names that torch keeps to itself, in one place that knows which of them the installed torch has.

`names` is the table: each name, its use here and the public way if torch has one. `check` looks names up.
Each other file holds the code that touches the names of one part of torch, and checks them when it is loaded.
"""
