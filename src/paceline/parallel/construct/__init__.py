"""Builds a model without any rank holding all of it: recorded on the meta device, replayed per tensor."""
