"""Saves that several writers make beside training, each for its rank."""
