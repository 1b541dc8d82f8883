"""The nodes of a job: torchelastic's agent, and the rendezvous where the nodes meet."""
