"""Private names of torch: the only place that uses them, and a table with the purpose of each.

`names` is the table: each name, its use here and the public way if torch has one. `check` searches the
installed torch for names. Each other file holds the code for one part of torch, and checks its names when it
is imported. `watching` and `starting` are imported before torch, so they import nothing of it. `fsdp` checks
its names when a model is sharded.
"""
