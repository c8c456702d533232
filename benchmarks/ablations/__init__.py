"""What each part of the engine is worth, by leaving it out."""
