"""Small models as people write them by hand, none of which Paceline was written for."""
