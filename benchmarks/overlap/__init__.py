"""The command `overlap`: how much of the transfers over a slow link computation hides."""
