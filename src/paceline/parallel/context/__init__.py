"""Context parallelism: the ranks of `cp` each have a part of every sequence between first block and head."""
