"""Expert parallelism: the experts of a mixture are shared among ranks, and tokens travel to their experts."""
