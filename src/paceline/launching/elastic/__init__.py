"""The nodes of a job: torchelastic's agent, and where and how the nodes meet."""
