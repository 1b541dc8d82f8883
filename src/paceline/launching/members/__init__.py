"""The launchers of a job as members: who is there, who is lost, and which of them form the next world."""
