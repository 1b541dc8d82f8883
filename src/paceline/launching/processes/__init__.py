"""The processes of a launch: the keeper, the ranks, the pump, and what they leave behind."""
