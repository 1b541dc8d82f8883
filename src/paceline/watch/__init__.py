"""Watches a job's ranks from beside them, and says why it hangs, mixes up collectives or is slow."""
