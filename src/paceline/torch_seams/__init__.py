"""Private names of torch: the only place that uses them, and a table of what each is for.

`names` is the table: each name, its use here and the public way if torch has one. `check` looks names up in
the installed torch. Each other file holds the code for one part of torch, and checks its names when it is
loaded. `watching` and `starting` are loaded before torch is, so they import nothing of it. `fsdp` checks its
names when a model is sharded.
"""
