"""Processes that train the same model and take steps in turn, so that their times can be compared."""
