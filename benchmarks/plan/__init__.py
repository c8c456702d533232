"""The planner's predictions against runs on this machine."""
