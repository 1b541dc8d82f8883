"""Shows that a layout gives the numbers of one process, and says where it does not (`check.verify`)."""
